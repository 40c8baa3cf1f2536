"""What a user says of a pilot: whether it acts, and between which sizes. Values; checked once, against the pools."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from afserve.config_ranges import Range
from afserve.control.pilot.hours import Hours, hours_of
from afserve.control.pilot.sizes import Limits, PoolSizes, TargetTimes
from afserve.errors import ConfigError, shown
from afserve.settings import check, flag_of, setting

OFF, ADVISE, ACT = MODES = ("off", "advise", "act")
_SECONDS = Range(0, 86_400, whole=False)
_TIMES = 2  # as many nodes as at first may there be, where nobody says how many


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotSettings:
    TOPIC: ClassVar[str] = "losses"

    pilot: str | None = setting(
        None,
        "How large pools should be: advise says so in the log, in `afserve status` and in /metrics; act changes them. "
        "advise with --prefill and --decode, else off.",
        MODES,
    )
    pilot_min: tuple[str, ...] = setting(
        (), "The fewest nodes of a pool, such as prefill=1,decode=2,experts=2.", metavar="POOL=N[,POOL=N]"
    )
    pilot_max: tuple[str, ...] = setting((), "The most, likewise.", metavar="POOL=N[,POOL=N]")
    pilot_nodes: int | None = setting(
        None,
        "The most nodes of all pools together; twice as many as at first.",
        Range(1, 1 << 16),
        metavar="N",
    )
    pilot_usd: float = setting(
        0.0,
        "The most US dollars an hour of all pools together, at --pilot-price; 0 for no limit.",
        Range(0, 1e9, whole=False),
        metavar="USD",
    )
    pilot_price: tuple[str, ...] = setting(
        (),
        "US dollars an hour of a node, such as prefill=2,decode=2,experts=1.5.",
        metavar="POOL=USD[,POOL=USD]",
    )
    pilot_hours: tuple[str, ...] = setting(
        (),
        "Hours of the day in which --pilot act changes pools, such as 22:00-06:00, by the controller's local time; "
        "else it advises.",
        metavar="HH:MM-HH:MM[,...]",
    )
    pilot_ttft: float = setting(
        0.0,
        "Seconds to a first token that pools are sized for; 0 for those of --ttft.",
        _SECONDS,
        metavar="SECONDS",
    )
    pilot_tpot: float = setting(
        0.0, "The same for the mean time between tokens.", _SECONDS, metavar="SECONDS"
    )
    pilot_idle: float = setting(
        0.0,
        "With --models and act: seconds without a request after which a model's nodes end until the next one; 0 for "
        "never.",
        _SECONDS,
        metavar="SECONDS",
    )
    pilot_hold: float = setting(
        600.0,
        "Seconds in which fewer nodes must have been enough before any goes.",
        Range(1, 86_400, whole=False),
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        check(self, flag_of)

    @property
    def hours(self) -> Hours:
        return hours_of(self.pilot_hours, "--pilot-hours")

    def mode(self, pools: bool) -> str:
        """`pools`: there are nodes that read prompts for others."""
        return self.pilot or (ADVISE if pools else OFF)

    def wanted(self, ttft: float, tpot: float) -> TargetTimes:
        """With the server's own times where none are said here; 0 asks for nothing."""
        never = float("inf")
        return TargetTimes(self.pilot_ttft or ttft or never, self.pilot_tpot or tpot or never)

    def limits(self, first: PoolSizes, least_experts: int, most: PoolSizes) -> Limits:
        """`first` sizes at the start, the fewest expert nodes that have room, and the `most` that the run can have, of
        nodes that read or decode together too.

        Raises ConfigError for a pool that is not there, and for limits that contradict each other or `first`.
        """
        names, attention = _names(first), most.decode
        fewest = _typed(self.pilot_min, "--pilot-min", names, _count)
        least = PoolSizes(*(min(one, 1) for one in first))._replace(**fewest)
        least = least.at_least(PoolSizes(0, 0, least_experts))
        most = most._replace(**_typed(self.pilot_max, "--pilot-max", names, _count)).at_most(most)
        budget = self.pilot_nodes or max(_TIMES * first.total, least.total)
        found = Limits(least, most, budget, attention, *self._money(names))
        _check_room(found)
        return found

    def _money(self, names: dict[str, str]) -> tuple[tuple[float, float, float], float]:
        """(prices by pool, the most an hour). Raises ConfigError where one is said without the other."""
        said = _typed(self.pilot_price, "--pilot-price", names, _price)
        if bool(self.pilot_usd) != bool(said):
            flag, other = ("--pilot-usd", "--pilot-price")[:: 1 if self.pilot_usd else -1]
            raise ConfigError(f"{flag}: does nothing without {other}", param=flag[2:].replace("-", "_"))
        lacking = [name for name, pool in names.items() if said and pool not in said]
        if lacking:
            raise ConfigError(
                f"--pilot-price: says nothing of {lacking[0]}; add {lacking[0]}=USD", param="pilot_price"
            )
        prices = tuple(said.get(pool, 0.0) for pool in PoolSizes._fields)
        return (prices[0], prices[1], prices[2]), self.pilot_usd or float("inf")


def _check_room(limits: Limits) -> None:
    least, cost = limits.least, limits.cost(limits.least)
    for pool, low, high in zip(PoolSizes._fields, least, limits.most, strict=True):
        if low > high:
            raise ConfigError(
                f"--pilot-max: at most {high} {pool} nodes, but there must be {low}; give a larger one",
                param="pilot_max",
            )
    if limits.budget < least.total:
        raise ConfigError(
            f"--pilot-nodes: {limits.budget} are fewer than the {least.total} that there must be at least ({least})",
            param="pilot_nodes",
        )
    if cost > limits.usd:
        raise ConfigError(
            f"--pilot-usd: the {least.total} nodes that there must be at least ({least}) cost {cost:g} an hour, more "
            f"than {limits.usd:g}",
            param="pilot_usd",
        )


def _names(first: PoolSizes) -> dict[str, str]:
    """What users call the pools that there are, and what `PoolSizes` does."""
    names = {"prefill": "prefill", "decode": "decode"} if first.prefill else {"attention": "decode"}
    return {**names, "experts": "experts"} if first.experts else names


Number = TypeVar("Number", int, float)


def _typed(
    texts: tuple[str, ...], flag: str, names: dict[str, str], read: Callable[[str], Number | None]
) -> dict[str, Number]:
    """By pool. Raises ConfigError."""
    found: dict[str, Number] = {}
    for text in texts:
        pool, _, said = text.partition("=")
        number = read(said) if pool in names else None
        if number is None:
            known = ", ".join(names)
            what = (
                "POOL=N with a pool of this run ({}) and a number from 1"
                if read is _count
                else "POOL=USD ({})"
            )
            raise ConfigError(
                f"{flag}: {shown(text)} is not {what.format(known)}", param=flag[2:].replace("-", "_")
            )
        if names[pool] in found:
            raise ConfigError(f"{flag}: says {pool} more than once", param=flag[2:].replace("-", "_"))
        found[names[pool]] = number
    return found


def _count(text: str) -> int | None:
    """A number of nodes."""
    return int(text) or None if text.isascii() and text.isdigit() and len(text) < 7 else None


def _price(text: str) -> float | None:
    """Of a node for an hour."""
    return float(text) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text, re.ASCII) else None


def pool_names(sizes: PoolSizes) -> dict[str, int]:
    """Nodes by what users call the pools that there are."""
    return {name: getattr(sizes, field) for name, field in _names(sizes).items()}
