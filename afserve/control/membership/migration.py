"""Moving a running cluster from one placement to another: which epoch is being filled, adopted or given up.

A state machine: what nodes answer comes in, what they are to be told goes out. It knows no sockets and no clock; times
are passed in. Expert nodes fill spare slots, then attention nodes adopt, then the expert nodes give the old epoch's
slots up; only then does the next stage begin. Wherever it stops, the placement in force is valid. Nodes may come and go
meanwhile.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from afserve.control.wire.placement_values import Adopt, FillSlots, Retire
from afserve.control.wire.values import ToNode
from afserve.errors import DeadlineError, ProtocolError
from afserve.member import NodeId, Role, expert_node
from afserve.placement.migrate import stages
from afserve.placement.placement import FREE, Placement

FILL_SECONDS = 600.0
ADOPT_SECONDS = 60.0

Outgoing = tuple[NodeId, ToNode]
Serving = Callable[[Role], Iterable[NodeId]]  # the nodes of a role that serve now


class Phase(Enum):
    STEADY = "steady"
    FILLING = "filling"
    ADOPTING = "adopting"


@dataclass(frozen=True, slots=True)
class PlacementRoute:
    """The stages between two placements."""

    start: Placement
    target: Placement
    stages: tuple[Placement, ...]


class Migration:
    """`placement` is what attention nodes may be routing by; `slots` are physical slots per expert node and layer."""

    def __init__(self, placement: Placement, serving: Serving) -> None:
        self.placement = placement
        self.phase = Phase.STEADY
        self.completed = 0
        self._serving = serving
        self._slots = placement.slots_per_node()
        self._following: Placement | None = None
        self._later: deque[Placement] = deque()
        self._urgent = False
        self._short = False  # somebody cannot read all that it is to fill
        self._held_by: tuple[tuple[Placement, ...], frozenset[int]] = ((), frozenset())
        self._missing: set[NodeId] = set()
        self._given_up: set[tuple[NodeId, int]] = set()  # fills that somebody may still answer
        self._deadline = 0.0
        self._next_epoch = placement.epoch

    @property
    def steady(self) -> bool:
        """Whether nothing is under way and nothing waits."""
        return self.phase is Phase.STEADY and not self._later

    def serving_experts(self) -> frozenset[int]:
        """The expert nodes that serve now."""
        return frozenset(node.index for node in self._serving(Role.EXPERT))

    @property
    def adopting(self) -> bool:
        """Whether some attention nodes may route by the next placement already, and others not yet."""
        return self.phase is Phase.ADOPTING

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Everything that rows may be routed by now or next."""
        following = () if self._following is None else (self._following,)
        return (self.placement, *following, *self._later)

    @property
    def unanswered(self) -> list[NodeId]:
        """Who has not answered yet."""
        return sorted(self._missing)

    def plan_route(self, target: Placement) -> PlacementRoute:
        """The way to `target` from where this is or will be next, thought out ahead. Raises ConfigError.

        The two may be of different numbers of nodes: a node that is in one of them only holds nothing in the other.
        """
        return self.route_by((target,))

    def route_by(self, targets: Sequence[Placement]) -> PlacementRoute:
        """The way to the last of these by way of the others."""
        start = self._following or self.placement
        nodes = max(start.nodes, *(target.nodes for target in targets))
        way = [start.with_nodes(nodes)]
        for target in targets:
            way += stages(way[-1], target.with_nodes(nodes), self._slots)
        return PlacementRoute(start, targets[-1], tuple(way[1:]))

    def resume(
        self,
        placement: Placement,
        following: Placement | None,
        missing: Iterable[NodeId],
        given_up: Iterable[tuple[NodeId, int]],
        newest: int,
        now: float,
    ) -> None:
        """Where another controller left it: `placement` in force, and `following` still to be adopted by `missing`.

        `given_up` are fills that somebody may still answer, `newest` is the last epoch that anybody has heard of.
        """
        self.placement, self._following, self._next_epoch = placement, following, newest
        self._given_up, self._missing = set(given_up), set(missing)
        self.phase = Phase.STEADY if following is None else Phase.ADOPTING
        self._deadline = now + ADOPT_SECONDS

    def forget_fill(self, node: NodeId, epoch: int) -> bool:
        """Whether this is an answer to a fill that was given up; said once."""
        known = (node, epoch) in self._given_up
        self._given_up.discard((node, epoch))
        return known

    def begin_move(
        self, target: Placement, now: float, route: PlacementRoute | None = None, *, urgent: bool = False
    ) -> list[Outgoing]:
        """Go to `target`; stages of an earlier target that have not begun are dropped. Raises ConfigError.

        `route` saves the thinking, where nothing has changed since it was thought out. `urgent` goes with the fills.
        """
        if (
            route is None
            or route.target is not target
            or route.start is not (self._following or self.placement)
        ):
            route = self.plan_route(target)
        self._later, self._urgent = deque(route.stages), urgent
        return self._advance(now) if self.phase is Phase.STEADY else []

    def filled(self, node: NodeId, epoch: int, now: float) -> list[Outgoing]:
        """An expert node holds everything that `epoch` names on it."""
        if self.forget_fill(node, epoch):
            return []
        self._answered(Phase.FILLING, node, epoch)
        return self._go_on(now)

    def unfilled(self, node: NodeId, epoch: int, now: float) -> list[Outgoing]:
        """An expert node cannot hold all of it. Once everybody has answered, what they were to fill is given up."""
        if self.forget_fill(node, epoch):
            return []
        self._answered(Phase.FILLING, node, epoch)
        self._short = True
        return self._go_on(now)

    def give_up_late(self) -> tuple[list[Outgoing], dict[NodeId, list[tuple[int, int]]]]:
        """Nobody waits any longer for those who fill; with what (MoE layer, expert) each may not have read."""
        following = self._following
        assert following is not None and self.phase is Phase.FILLING
        fills = self.placement.with_nodes(following.nodes).diff(following).fills
        late = {node: [(f.layer, f.expert) for f in fills if f.node == node.index] for node in self._missing}
        return self._give_up(), late

    def adopted(self, node: NodeId, epoch: int, now: float) -> list[Outgoing]:
        """An attention node routes by `epoch` and has nothing under way from before."""
        self._answered(Phase.ADOPTING, node, epoch)
        return self._go_on(now)

    def drop_node(self, node: NodeId, now: float) -> list[Outgoing]:
        """A node is gone: nobody waits for it. What it was to fill is given up, as nobody routes by that yet.

        Its successor begins with the placement in force, so no later stage may count on what it would have held.
        """
        self._given_up = {(other, epoch) for other, epoch in self._given_up if other != node}
        if self.phase is Phase.FILLING and self.holds_experts(node):
            return self._give_up(node)
        if any(node in holders(placement) for placement in self._later):
            self._later.clear()
        self._missing.discard(node)
        return self._go_on(now)

    def _give_up(self, lost: NodeId | None = None) -> list[Outgoing]:
        following = self._following
        assert following is not None
        self._given_up |= {(node, following.epoch) for node in self._missing if node != lost}
        self._later.clear()
        self._following, self.phase, self._missing = None, Phase.STEADY, set()
        others = [node for node in self._serving(Role.EXPERT) if node != lost]
        return [(node, Retire(following.epoch)) for node in others]

    def holds_experts(self, node: NodeId) -> bool:
        """Whether a placement that rows may be routed by now or later puts an expert on this node."""
        return node.role is Role.EXPERT and node.index in self.holding

    @property
    def holding(self) -> frozenset[int]:
        """The expert nodes that any of these placements puts an expert on. Asked at every event, so it is kept."""
        placements = self.placements
        if placements != self._held_by[0]:  # the same values are the same objects: nothing large is compared
            found = frozenset(node.index for placement in placements for node in holders(placement))
            self._held_by = placements, found
        return self._held_by[1]

    def include_node(self, node: NodeId) -> list[Outgoing]:
        """A node serves from now on, with the placement in force; it takes part in what is under way."""
        following = self._following
        if following is None or self.phase is Phase.STEADY:
            return []
        role = Role.EXPERT if self.phase is Phase.FILLING else Role.ATTENTION
        if node.role is not role:
            return []
        self._missing.add(node)
        return [(node, asks(self.phase, following, urgent=self._urgent))]

    def check_deadline(self, now: float) -> None:
        """Raises DeadlineError naming who has not answered in time."""
        if self.phase is not Phase.STEADY and now > self._deadline:
            doing = "filled" if self.phase is Phase.FILLING else "adopted"
            who = ", ".join(map(str, self.unanswered))
            assert self._following is not None
            raise DeadlineError(
                f"{who}: epoch {self._following.epoch} was not {doing} in time; stop and start again"
            )

    def _go_on(self, now: float) -> list[Outgoing]:
        """When nobody is missing any more."""
        if self.phase is Phase.STEADY or self._missing:
            return []
        following = self._following
        assert following is not None
        if self.phase is Phase.FILLING:
            return self._give_up() if self._short else self._ask(Phase.ADOPTING, following, now)
        old, self.placement, self._following = self.placement, following, None
        self.phase = Phase.STEADY
        self.completed += 1
        given_up: list[Outgoing] = [(node, Retire(old.epoch)) for node in self._serving(Role.EXPERT)]
        return given_up + self._advance(now)

    def _advance(self, now: float) -> list[Outgoing]:
        if not self._later:
            return []
        # Numbers never repeat, also when a later target drops stages that were numbered already.
        self._next_epoch += 1
        self._following = self._later.popleft().with_epoch(self._next_epoch)
        return self._ask(Phase.FILLING, self._following, now)

    def _ask(self, phase: Phase, following: Placement, now: float) -> list[Outgoing]:
        """Everyone of a role who serves. Whoever is away begins with the placement in force when it is back."""
        filling = phase is Phase.FILLING
        self._short = False
        self.phase, self._deadline = phase, now + (FILL_SECONDS if filling else ADOPT_SECONDS)
        here = self._missing = set(self._serving(Role.EXPERT if filling else Role.ATTENTION))
        asked = asks(phase, following, urgent=self._urgent)
        return [(node, asked) for node in sorted(here)] + self._go_on(now)

    def _answered(self, phase: Phase, node: NodeId, epoch: int) -> None:
        following = self._following
        if (
            self.phase is not phase
            or following is None
            or epoch != following.epoch
            or node not in self._missing
        ):
            raise ProtocolError(
                f"{node} answered for epoch {epoch}, which was not asked of it ({self.phase.value})"
            )
        self._missing.discard(node)


def holders(placement: Placement) -> set[NodeId]:
    """Expert nodes that hold any expert."""
    return {expert_node(int(n)) for n in np.flatnonzero((placement.slot_array() != FREE).any((0, 2)))}


def asks(phase: Phase, placement: Placement, *, urgent: bool = False) -> ToNode:
    return FillSlots(placement, urgent) if phase is Phase.FILLING else Adopt(placement)
