"""What the controller and nodes say to each other of placements: what is to be loaded, routed by and given up, and what
was routed. Plain frozen values.
"""

from dataclasses import dataclass

from afserve.placement.placement import Placement
from afserve.placement.rebalance.stats import RoutedRows


@dataclass(frozen=True, slots=True)
class Routed:
    """Rows that an attention node has routed since it last said so; nothing is said while there are none."""

    rows: RoutedRows


@dataclass(frozen=True, slots=True)
class FillSlots:
    """To expert nodes: load what `placement` adds into free slots, then say `Filled` with its epoch.

    `urgent` where rows wait for it: as fast as the weights can be read, whatever serving pays for that.
    """

    placement: Placement
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Filled:
    """An expert node holds everything that the placement `epoch` names on it, and what was loaded for that."""

    epoch: int
    experts: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Unfilled:
    """An expert node cannot read these experts, as (MoE layer, expert), of the placement `epoch`.

    It goes on with what it has, and gives that epoch up. `why` is of the first.
    """

    epoch: int
    experts: tuple[tuple[int, int], ...]
    why: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """To attention nodes: route by `placement` from the next step on, then say `Adopted` with its epoch."""

    placement: Placement


@dataclass(frozen=True, slots=True)
class Adopted:
    """An attention node routes by `epoch` and has nothing under way that was routed before."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Retire:
    """To expert nodes: nothing routed under `epoch` will come any more."""

    epoch: int
