"""What a running deployment lacks, and for how long: experts that no node holds, attention nodes. Then new requests are
refused, with words for people, until it is there again.

What running requests wait for is the link's and the gateways' business, what is done about it that of `placing.py`. It
tells nobody anything; times are passed in.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from afserve.control.membership.events import Cause, Happening, Incident
from afserve.control.membership.members import Members
from afserve.control.membership.roster import Member, State
from afserve.member import Life, NodeId, Role, expert_node
from afserve.placement.placement import Placement
from afserve.placement.recovery import LayerExpert, homeless, recovered

_WORDS = {
    Cause.ENDED: "its process ended",
    Cause.SILENT: "it said nothing",
    Cause.SLOW: "it was too slow",
    Cause.FAILED: "it failed; the server's log says why",
    Cause.REFUSED: "it was sent away; the server's log says why",
}


@dataclass(frozen=True, slots=True)
class ShortagePatience:
    """Seconds until new requests are refused: `short` where nothing is under way that would help, else `long`."""

    short: float
    long: float


@dataclass(frozen=True, slots=True)
class Homeless:
    """Experts that no serving node holds, as (MoE layer, expert); `beyond` are those that no other has room for."""

    experts: tuple[LayerExpert, ...] = ()
    beyond: tuple[LayerExpert, ...] = ()


class Shortage:
    """`room`: experts of a layer that a node can hold. `refusing`: why new requests are refused, or empty."""

    def __init__(self, patience: ShortagePatience, room: int) -> None:
        self.refusing = ""
        self._patience = patience
        self._room = room
        self._since: dict[str, float] = {}  # what is lacking
        self._known: tuple[tuple[int, frozenset[int]], Homeless] = ((-1, frozenset()), Homeless())

    def check_shortage(
        self,
        members: Members,
        placement: Placement,
        failing: Collection[NodeId],
        now: float,
        *,
        planned: bool,
    ) -> None:
        """`failing` are places whose next process cannot be counted on. `planned`: nodes get new ones by wish.

        New requests wait as long as running ones do for a node that is started, and for what is planned.
        """
        found: dict[str, tuple[str, float]] = {}

        def seconds(role: Role) -> float:
            view = members.role_view(role)
            coming = {*view.vacancies, *(member.node for member in view.unready)} - set(failing)
            return self._patience.long if coming or planned else self._patience.short

        if not any(member.state is State.READY for member in members.living(Role.ATTENTION)):
            found["attention"] = (
                "no attention node serves" + _why(members, Role.ATTENTION),
                seconds(Role.ATTENTION),
            )
        lost = self._homeless(members, placement)
        if lost.beyond:
            found["room"] = _without_room(members, placement, lost.beyond), seconds(Role.EXPERT)
        elif lost.experts:
            found["loading"] = _not_loaded(members, placement, lost.experts), self._patience.long
        self._since = {lack: self._since.get(lack, now) for lack in found}
        due = [words for lack, (words, seconds) in found.items() if now - self._since[lack] >= seconds]
        self.refusing = "; ".join(due)

    def _homeless(self, members: Members, placement: Placement) -> Homeless:
        if not members.places(Role.EXPERT):
            return Homeless()
        key = placement.epoch, members.role_view(Role.EXPERT).serving_indices
        if key != self._known[0]:
            self._known = key, lacking(placement, key[1], self._room)
        return self._known[1]


def lacking(placement: Placement, serving: frozenset[int], room: int) -> Homeless:
    """What no node of `serving` holds by this placement."""
    experts = homeless(placement, serving)
    if not experts:
        return Homeless()
    placement = placement.with_nodes(max(placement.nodes, max(serving, default=-1) + 1))
    lost = frozenset(range(placement.nodes)) - serving
    return Homeless(experts, tuple(sorted(recovered(placement, lost, room).homeless)))


def _without_room(members: Members, placement: Placement, experts: Sequence[LayerExpert]) -> str:
    return f"{_stood(members, placement, experts)}, and the other expert nodes have no room for that"


def _not_loaded(members: Members, placement: Placement, experts: Sequence[LayerExpert]) -> str:
    return f"{_stood(members, placement, experts)}, and is still being loaded elsewhere"


def _stood(members: Members, placement: Placement, experts: Sequence[LayerExpert]) -> str:
    """The first by name, with the nodes that held it."""
    layer, expert = experts[0]
    nodes = sorted({node for node, _, _ in placement.layers[layer].replicas(expert)})
    where = ", ".join(f"{expert_node(node)}{_reason(members, node)}" for node in nodes)
    more = f" (and {len(experts) - 1} more)" if len(experts) > 1 else ""
    return f"expert {expert} of MoE layer {layer}{more} stood only on {where}"


def _reason(members: Members, index: int) -> str:
    member = members.last_at(expert_node(index))
    return f" ({_lost(member)})" if member is not None and member.lost_by else ""


def _lost(member: Member) -> str:
    """For clients: without paths, pids and what else is the operator's."""
    return _WORDS[member.lost_by] if member.lost_by else ""


def _why(members: Members, role: Role) -> str:
    lost = [(node, members.last_at(node)) for node in members.role_view(role).vacancies]
    known = [f"{node}: {_lost(member)}" for node, member in lost if member is not None and member.lost_by]
    return f" ({'; '.join(known)})" if known else ""


class Coverage:
    """Owns the first loss that left experts without a node, until all have one again."""

    def __init__(self) -> None:
        self._lost: Life | None = None
        self._since = 0.0
        self._seen: tuple[int, frozenset[int]] | None = None

    @property
    def lacking(self) -> bool:
        """Whether a loss has left experts without a node since which not all were seen to have one again."""
        return self._lost is not None

    def explain_loss(self, member: Life, placement: Placement, serving: frozenset[int], now: float) -> str:
        """An expert node is gone, `serving` are left. What becomes of its rows, in words."""
        alone = len(homeless(placement, serving))
        if not alone:
            return "its rows go to replicas"
        if self._lost is None:
            self._lost, self._since, self._seen = member, now, None
        return f"{alone} experts that no other node holds are loaded elsewhere or wait for its return"

    def check_covered(self, placement: Placement, serving: frozenset[int], now: float) -> list[Incident]:
        """Said once, when every expert has a node again."""
        if self._lost is None or self._seen == (placement.epoch, serving):
            return []
        self._seen = (placement.epoch, serving)
        if homeless(placement, serving):
            return []
        lost, self._lost = self._lost, None
        why = f"every expert has a node again, epoch {placement.epoch}"
        return [Incident(Happening.COVERED, lost.node, why, now - self._since, generation=lost.generation)]
