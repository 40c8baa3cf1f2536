"""What a user says of a pilot: whether it acts, and between which sizes. Values; checked once, against the pools."""

from dataclasses import dataclass
from typing import ClassVar

from afserve.config_ranges import Range
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
    pilot_ttft: float = setting(
        0.0,
        "Seconds to a first token that pools are sized for; 0 for those of --ttft.",
        _SECONDS,
        metavar="SECONDS",
    )
    pilot_tpot: float = setting(
        0.0, "The same for the mean time between tokens.", _SECONDS, metavar="SECONDS"
    )
    pilot_hold: float = setting(
        600.0,
        "Seconds in which fewer nodes must have been enough before any goes.",
        Range(1, 86_400, whole=False),
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        check(self, flag_of)

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
        none = PoolSizes(0, 0, 0)
        least = _typed(self.pilot_min, "--pilot-min", names, PoolSizes(*(min(one, 1) for one in first)))
        least = least.at_least(none._replace(experts=least_experts))
        most = _typed(self.pilot_max, "--pilot-max", names, most).at_most(most)
        budget = self.pilot_nodes or max(_TIMES * first.total, least.total)
        for pool, low, high in zip(PoolSizes._fields, least, most, strict=True):
            if low > high:
                raise ConfigError(
                    f"--pilot-max: at most {high} {pool} nodes, but there must be {low}; give a larger one",
                    param="pilot_max",
                )
        if budget < least.total:
            raise ConfigError(
                f"--pilot-nodes: {budget} are fewer than the {least.total} that there must be at least ({least})",
                param="pilot_nodes",
            )
        return Limits(least, most, budget, attention)


def _names(first: PoolSizes) -> dict[str, str]:
    """What users call the pools that there are, and what `PoolSizes` does."""
    names = {"prefill": "prefill", "decode": "decode"} if first.prefill else {"attention": "decode"}
    return {**names, "experts": "experts"} if first.experts else names


def _typed(texts: tuple[str, ...], flag: str, names: dict[str, str], otherwise: PoolSizes) -> PoolSizes:
    found: dict[str, int] = {}
    for text in texts:
        pool, _, count = text.partition("=")
        if pool not in names or not (
            count.isascii() and count.isdigit() and 0 < len(count) < 7 and int(count)
        ):
            known = ", ".join(names)
            raise ConfigError(
                f"{flag}: {shown(text)} is not POOL=N with a pool of this run ({known}) and a number from 1",
                param=flag[2:].replace("-", "_"),
            )
        found[names[pool]] = int(count)
    return otherwise._replace(**found)


def pool_names(sizes: PoolSizes) -> dict[str, int]:
    """Nodes by what users call the pools that there are."""
    return {name: getattr(sizes, field) for name, field in _names(sizes).items()}
