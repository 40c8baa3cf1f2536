"""Hours of the day in which a pilot may change pools. Values; times are passed in."""

import re
import time
from dataclasses import dataclass

from afserve.errors import ConfigError, shown

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_SPAN = re.compile(r"([01]?[0-9]|2[0-4]):([0-5][0-9])-([01]?[0-9]|2[0-4]):([0-5][0-9])", re.ASCII)


@dataclass(frozen=True, slots=True)
class Hours:
    """`spans`: (begin, end) in seconds of a day; an end before its begin is on the next day. None of them: always."""

    spans: tuple[tuple[float, float], ...] = ()

    def hold_at(self, local: time.struct_time) -> bool:
        return self.hold(local.tm_hour * _HOUR + local.tm_min * _MINUTE + local.tm_sec)

    def hold(self, second: float) -> bool:
        """Whether this second of a day is in them."""
        if not self.spans:
            return True
        return any(
            begin <= second < end if begin < end else second >= begin or second < end
            for begin, end in self.spans
        )


def hours_of(texts: tuple[str, ...], flag: str) -> Hours:
    """Of HH:MM-HH:MM. Raises ConfigError."""
    return Hours(tuple(_span(text, flag) for text in texts))


def _span(text: str, flag: str) -> tuple[float, float]:
    found = _SPAN.fullmatch(text[:16])
    if found is not None:
        numbers = [int(part) for part in found.groups()]
        begin, end = (numbers[at] * _HOUR + numbers[at + 1] * _MINUTE for at in (0, 2))
        if begin != end and begin < _DAY and end <= _DAY:
            return begin, end
    raise ConfigError(
        f"{flag}: {shown(text)} is not a span of a day such as 22:00-06:00", param=flag[2:].replace("-", "_")
    )
