"""Moving a running cluster from one placement to another: which epoch is being filled, adopted or given up.

A state machine: what nodes answer comes in, what they are to be told goes out. It knows no sockets and no clock; times
are passed in. Expert nodes fill spare slots, then attention nodes adopt, then the expert nodes give the old epoch's
slots up; only then does the next stage begin. Wherever it stops, the placement in force is valid.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from afserve.control.values import Adopt, FillSlots, Retire, ToNode, node_name
from afserve.engine.migrate import stages
from afserve.errors import DeadlineError, ProtocolError
from afserve.placement.plan import Placement

FILL_SECONDS = 600.0
ADOPT_SECONDS = 60.0

Outgoing = tuple[str, int, ToNode]


class Phase(Enum):
    STEADY = "steady"
    FILLING = "filling"
    ADOPTING = "adopting"


@dataclass(frozen=True, slots=True)
class Crew:
    """How many nodes of each role take part."""

    attention: int
    experts: int


@dataclass(frozen=True, slots=True)
class Route:
    """The stages between two placements."""

    start: Placement
    target: Placement
    stages: tuple[Placement, ...]


class Migration:
    """`placement` is what attention nodes may be routing by; `slots` are physical slots per expert node and layer."""

    def __init__(self, placement: Placement, crew: Crew) -> None:
        self.placement = placement
        self.phase = Phase.STEADY
        self.completed = 0
        self._crew = crew
        self._slots = placement.slots_per_node()
        self._following: Placement | None = None
        self._later: deque[Placement] = deque()
        self._missing: set[int] = set()
        self._deadline = 0.0
        self._next_epoch = placement.epoch

    @property
    def steady(self) -> bool:
        """Whether nothing is under way and nothing waits."""
        return self.phase is Phase.STEADY and not self._later

    def route(self, target: Placement) -> Route:
        """The way to `target` from where this is or will be next, thought out ahead. Raises ConfigError."""
        start = self._following or self.placement
        return Route(start, target, tuple(stages(start, target, self._slots)))

    def begin(self, target: Placement, now: float, route: Route | None = None) -> list[Outgoing]:
        """Go to `target`; stages of an earlier target that have not begun are dropped. Raises ConfigError.

        `route` saves the thinking, where nothing has changed since it was thought out.
        """
        if (
            route is None
            or route.target is not target
            or route.start is not (self._following or self.placement)
        ):
            route = self.route(target)
        self._later = deque(route.stages)
        return self._advance(now) if self.phase is Phase.STEADY else []

    def filled(self, node: int, epoch: int, now: float) -> list[Outgoing]:
        """Expert node `node` holds everything that `epoch` names."""
        following = self._expect(Phase.FILLING, node_name("expert", node), node, epoch)
        if self._missing:
            return []
        self.phase = Phase.ADOPTING
        self._missing = set(range(self._crew.attention))
        self._deadline = now + ADOPT_SECONDS
        value = Adopt(following.epoch, following.to_json())
        return [("attention", index, value) for index in range(self._crew.attention)]

    def adopted(self, node: int, epoch: int, now: float) -> list[Outgoing]:
        """Attention node `node` routes by `epoch` and has nothing under way from before."""
        following = self._expect(Phase.ADOPTING, node_name("attention", node), node, epoch)
        if self._missing:
            return []
        old, self.placement, self._following = self.placement, following, None
        self.phase = Phase.STEADY
        self.completed += 1
        given_up: list[Outgoing] = [("expert", i, Retire(old.epoch)) for i in range(self._crew.experts)]
        return given_up + self._advance(now)

    def check(self, now: float) -> None:
        """Raises DeadlineError naming who has not answered in time."""
        if self.phase is not Phase.STEADY and now > self._deadline:
            role, doing = ("expert", "filled") if self.phase is Phase.FILLING else ("attention", "adopted")
            who = ", ".join(node_name(role, index) for index in sorted(self._missing))
            assert self._following is not None
            raise DeadlineError(
                f"{who}: epoch {self._following.epoch} was not {doing} in time; stop and start again"
            )

    def _advance(self, now: float) -> list[Outgoing]:
        if not self._later:
            return []
        # Numbers never repeat, also when a later target drops stages that were numbered already.
        self._next_epoch += 1
        self._following = self._later.popleft().with_epoch(self._next_epoch)
        self.phase = Phase.FILLING
        self._missing = set(range(self._crew.experts))
        self._deadline = now + FILL_SECONDS
        value = FillSlots(self._following.epoch, self._following.to_json())
        return [("expert", index, value) for index in range(self._crew.experts)]

    def _expect(self, phase: Phase, name: str, node: int, epoch: int) -> Placement:
        following = self._following
        if (
            self.phase is not phase
            or following is None
            or epoch != following.epoch
            or node not in self._missing
        ):
            raise ProtocolError(
                f"{name} answered for epoch {epoch}, which was not asked of it ({self.phase.value})"
            )
        self._missing.discard(node)
        return following
