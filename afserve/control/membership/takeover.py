"""What a new controller makes of those who were there before it: who stays, and which placement is in force.

Values in, values out. Each node says what it holds and what it was asked for. A change of placement that was under way
is finished or rolled back, and the attention nodes decide which:

- An attention node was asked to adopt an epoch only once every expert node that served had filled it. So where any of
  them routes by an epoch, or was asked to adopt it, that epoch is finished: the highest such one follows, and the
  one that others still route by stays in force until they have adopted it too.
- An epoch that is only on expert nodes, filled or being filled, is routed by nobody: it is given up, and its slots are
  free again.
- Expert nodes give an epoch up only once nobody routes by it any more. So an attention node that routes by an epoch
  which some expert node has replaced was lost before, and does not know it: it is sent away.
- Where no attention node is left, nobody routes, and the highest epoch that an expert node holds is in force.

An expert node that does not hold all that is in force serves once it does, as one that is new.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from afserve.control.membership.members import NO_EPOCH
from afserve.control.membership.roster import State
from afserve.control.wire.values import NodeStage, Register, Standing
from afserve.errors import RendezvousError
from afserve.member import NodeId, Role
from afserve.placement.placement import Placement

REJOIN_SECONDS = 2.0  # from a controller's start until those who have not come back are lost
_SERVES = (NodeStage.SERVING, NodeStage.DRAINING, NodeStage.DRAINED)
_STATES = {
    NodeStage.LOADING: State.LOADING,
    NodeStage.LOADED: State.LOADING,
    NodeStage.SERVING: State.READY,
    NodeStage.DRAINING: State.DRAINING,
    NodeStage.DRAINED: State.DRAINED,
}


@dataclass(frozen=True, slots=True)
class NodeClaim:
    """Somebody says that it has this place."""

    connection: int
    node: NodeId
    register: Register
    standing: Standing


@dataclass(slots=True)
class Takeover:
    """Who has come back since `began`."""

    began: float
    claims: dict[NodeId, NodeClaim] = field(default_factory=dict)

    def claim(self, claim: NodeClaim) -> NodeClaim | None:
        """Of two lives of a node the later one counts, of two streams of a life too; returns the other."""
        other = self.claims.get(claim.node)
        if other is not None and other.standing.generation > claim.standing.generation:
            return claim
        self.claims[claim.node] = claim
        return other

    def withdraw(self, connection: int) -> None:
        self.claims = {node: one for node, one in self.claims.items() if one.connection != connection}

    def all_back(self, counts: Mapping[Role, int]) -> bool:
        """Whether as many of each role are back as are wanted."""
        return all(len(self.claims_of(role)) >= count for role, count in counts.items())

    def claims_of(self, role: Role) -> list[NodeClaim]:
        return [claim for node, claim in sorted(self.claims.items()) if node.role is role]


@dataclass(frozen=True, slots=True)
class Inherited:
    """`following` is being adopted by those who do not route by it yet. `newest` is the last epoch of all."""

    placement: Placement
    following: Placement | None
    newest: int

    @property
    def placements(self) -> tuple[Placement, ...]:
        """All that may be routed by."""
        return (self.placement,) if self.following is None else (self.placement, self.following)

    @property
    def epochs(self) -> frozenset[int]:
        return _epochs(self.placements)

    def check_claim(self, claim: NodeClaim) -> None:
        """Raises RendezvousError for an attention node that would route to the wrong slots."""
        if claim.node.role is not Role.ATTENTION:
            return
        known = _epochs(claim.standing.asked)
        if _serves(claim.standing):
            known |= _epochs(claim.standing.held)
        if strange := sorted(known - self.epochs):
            raise RendezvousError(
                f"{claim.node} knows epoch {strange[0]}, epoch {self.placement.epoch} is in force; start it anew"
            )

    def state(self, role: Role, standing: Standing) -> tuple[State, int, int]:
        """How a node is, the epoch that it knows and the one that it was told last."""
        in_force = self.placement.epoch
        if role is Role.GATEWAY:
            return (
                _STATES[NodeStage.SERVING if standing.stage is NodeStage.LOADED else standing.stage],
                in_force,
                in_force,
            )
        held, asked = _epochs(standing.held), _epochs(standing.asked)
        if role is Role.EXPERT:
            knows = in_force if in_force in held else max(held, default=NO_EPOCH)
            told = in_force if in_force in asked else knows
            return State.READY if self._holds_all(standing) else State.LOADING, knows, told
        knows = max(held)
        told = max(asked, default=knows)
        serves = (
            standing.stage is NodeStage.LOADED and self.following is not None and told == self.following.epoch
        )
        return State.READY if serves else _STATES[standing.stage], knows, told

    def given_up(self, role: Role, standing: Standing) -> list[int]:
        """Epochs that an expert node fills and that nobody will route by, or not before it is asked again."""
        if role is not Role.EXPERT:
            return []
        return sorted(_epochs(standing.asked) - {self.placement.epoch})

    def obsolete(self, role: Role, standing: Standing) -> list[int]:
        """Epochs that an expert node keeps slots for in vain."""
        if role is not Role.EXPERT:
            return []
        kept = self.epochs if self._holds_all(standing) else {self.placement.epoch}
        filling = _epochs(standing.asked) if standing.loaded else frozenset()
        held = _epochs(standing.held) if standing.loaded else frozenset()
        return sorted((held | filling) - kept)

    def _holds_all(self, standing: Standing) -> bool:
        return standing.loaded and self.epochs <= _epochs(standing.held)


def inherit(takeover: Takeover, initial: Placement) -> Inherited:
    """`initial` where nobody knows any better."""
    attention = [claim.standing for claim in takeover.claims_of(Role.ATTENTION)]
    experts = [claim.standing for claim in takeover.claims_of(Role.EXPERT) if claim.standing.loaded]
    known = {initial.epoch: initial}
    for placement in _all(claim.standing for claim in takeover.claims.values()):
        known[placement.epoch] = placement
    newest = max(initial.epoch, *(claim.standing.newest for claim in takeover.claims.values()), 0)
    routing = [s for s in attention if _serves(s) and not _replaced(s, experts)]
    if not routing:
        held = [epoch for standing in experts for epoch in _epochs(standing.held)]
        held = held or [epoch for standing in attention for epoch in _epochs(standing.held)]
        return Inherited(known[max(held)] if held else initial, None, newest)
    by = {epoch for standing in routing for epoch in _epochs(standing.held)}
    highest = max(by.union(*(_epochs(standing.asked) for standing in routing)))
    earlier = [epoch for epoch in by if epoch < highest]
    if not earlier:
        return Inherited(known[highest], None, newest)
    return Inherited(known[max(earlier)], known[highest], newest)


def _serves(standing: Standing) -> bool:
    """Whether an attention node routes rows."""
    return standing.stage in _SERVES


def _replaced(standing: Standing, experts: list[Standing]) -> bool:
    """Whether some expert node has gone on from what this attention node routes by."""
    by = max(_epochs(standing.held))
    return any(max(held) > by and by not in held for expert in experts if (held := _epochs(expert.held)))


def _epochs(placements: Iterable[Placement]) -> frozenset[int]:
    return frozenset(placement.epoch for placement in placements)


def _all(standings: Iterable[Standing]) -> Iterator[Placement]:
    for standing in standings:
        yield from standing.held
        yield from standing.asked
