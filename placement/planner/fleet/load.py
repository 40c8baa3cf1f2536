"""How many requests a second come in each hour of a day or a week, and how that grows by the month. Opens no files."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from afserve.errors import ConfigError, shown

COLUMNS = ("hour", "requests_per_s")
_MOST_HOURS, _MOST_RATE = 24 * 366, 1e9
_MOST_MONTHS, _MOST_FACTOR, _MOST_LOG = 120, 1e6, 700.0


@dataclass(frozen=True, slots=True)
class HourlyLoad:
    """rates: requests per second of each hour of a period that repeats itself."""

    rates: tuple[float, ...]

    @property
    def peak(self) -> float:
        return max(self.rates)

    @property
    def requests(self) -> float:
        """Of the whole period."""
        return sum(self.rates) * 3600

    def times(self, factor: float) -> "HourlyLoad":
        return HourlyLoad(tuple(factor * rate for rate in self.rates))


def constant(rate: float) -> HourlyLoad:
    """The same rate in each hour of a day."""
    return HourlyLoad((rate,) * 24)


def read_load(source: str, lines: Sequence[str]) -> HourlyLoad:
    """CSV with the columns hour and requests_per_s, one row for each hour from the first one on. Raises ConfigError
    naming `source`, the row and what is wrong."""
    rows = list(csv.reader(line for line in lines if line.strip()))
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    if header != list(COLUMNS):
        raise ConfigError(
            f"{source}: the first line must be {','.join(COLUMNS)}, not {shown(','.join(header))}"
        )
    if not 1 <= len(rows) - 1 <= _MOST_HOURS:
        raise ConfigError(f"{source}: it has {len(rows) - 1:,} hours; 1 to {_MOST_HOURS:,} are read")
    found = tuple(_rate(source, place, row) for place, row in enumerate(rows[1:]))
    if max(found) <= 0:
        raise ConfigError(f"{source}: no request comes in any hour")
    return HourlyLoad(found)


def _rate(source: str, place: int, row: Sequence[str]) -> float:
    where = f"{source}: row {place + 2}"
    if len(row) != len(COLUMNS):
        raise ConfigError(f"{where} has {len(row)} columns, not {len(COLUMNS)}")
    hour, rate = (_number(cell) for cell in row)
    if hour != place:
        raise ConfigError(
            f"{where}: the hour must be {place}, not {shown(row[0].strip())}; hours go up by one"
        )
    if not 0 <= rate <= _MOST_RATE:
        raise ConfigError(f"{where}: {shown(row[1].strip())} is no number of requests per second")
    return rate


def read_growth(text: str, months: int) -> tuple[float, ...]:
    """'8%': so much more each month; '1,1.2,1.5': factors of the first months, the last one for all that follow.
    Raises ConfigError."""
    if text.endswith("%"):
        share = _number(text[:-1]) / 100
        logs = [month * math.log1p(share) for month in range(months)] if -1 < share < _MOST_FACTOR else []
        found = [math.exp(log) if log < _MOST_LOG else math.inf for log in logs]
    else:
        typed = [_number(part) for part in text.split(",")[:_MOST_MONTHS]]
        found = [typed[min(month, len(typed) - 1)] for month in range(months)]
    if not found or not all(0 < factor <= _MOST_FACTOR for factor in found):
        raise ConfigError(
            f"--growth {shown(text)}: write 8% (a month), or factors of the months such as 1,1.2,1.5; in all months "
            f"they must be above 0 and up to {_MOST_FACTOR:,.0f}"
        )
    return tuple(found)


def _number(text: str) -> float:
    """Not a number where it is none."""
    try:
        return float(text) if len(text) < 64 else math.nan
    except ValueError:
        return math.nan


def months_of(load: HourlyLoad, factors: Sequence[float]) -> Iterator[tuple[int, HourlyLoad]]:
    """(month from 1 on, its load)."""
    for month, factor in enumerate(factors, start=1):
        yield month, load.times(factor)
