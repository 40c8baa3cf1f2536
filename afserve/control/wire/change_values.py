"""What people may ask of a running deployment, and what they are answered: values that HTTP, gateways and the
controller share.

A change is obeyed at once or refused; how far it has come is seen in the list of members.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from afserve.errors import ConfigError, shown
from afserve.member import AttentionPhase, Role

PHASE_POOLS: Mapping[str, AttentionPhase] = {
    "prefill": AttentionPhase.PREFILL,
    "decode": AttentionPhase.DECODE,
}
POOLS: Mapping[str, Role] = {"attention": Role.ATTENTION, "experts": Role.EXPERT, "gateways": Role.GATEWAY}
MOST_FAULT_SECONDS = 3600.0
_LONGEST = 8  # characters of a number of nodes


@dataclass(frozen=True, slots=True)
class ScaleTo:
    """Other numbers of nodes, by pool: `3` is how many there shall be, `+1` and `-1` how many more or fewer."""

    counts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DrainOne:
    """This node takes nothing new, and goes once nothing needs it."""

    node: str


@dataclass(frozen=True, slots=True)
class Restart:
    """New processes for these nodes, one after another; none stands for all of them."""

    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NewRole:
    """This node goes as one that is drained, and a process of this role, attention or expert, starts in its place."""

    node: str
    role: str


@dataclass(frozen=True, slots=True)
class NewPhase:
    """This attention node computes prompts for others, or has them computed by others, or does both itself."""

    node: str
    phase: str


class FaultKind(StrEnum):
    """Killed; stopped for a while; or at a tenth of its speed for a while."""

    KILL = "kill"
    STOP = "stop"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Fault:
    """Break the process of this node on purpose. `seconds` is how long it is stopped or slow."""

    node: str
    fault: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class End:
    """The whole run ends, as it does on SIGTERM: running requests have their time first."""


Change = ScaleTo | DrainOne | Restart | NewRole | NewPhase | Fault | End


@dataclass(frozen=True, slots=True)
class Changed:
    """How many nodes of each pool are wanted now, who comes, who goes (both: gets a new process), and what to know."""

    counts: Mapping[str, int]
    coming: tuple[str, ...] = ()
    going: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)


def count_of(pool: str, now: int, wanted: str) -> int:
    """Raises ConfigError for what is no number of nodes."""
    signed = wanted[:1] in ("+", "-")
    digits = wanted[1:] if signed else wanted
    if not digits.isascii() or not digits.isdecimal() or len(digits) > _LONGEST:
        raise ConfigError(
            f"{pool}: {shown(wanted)} is no number of nodes, such as 3, and no change of it, such as +1 or -1",
            param=pool,
        )
    return now + int(wanted) if signed else int(wanted)
