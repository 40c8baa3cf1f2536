"""Who is there and how each one is, beside the places to be filled. Values in, values and RendezvousErrors out.

It knows no streams and no clock; times are passed in. A place stays when its member goes; its next member has the next
generation. A mismatch names the node and the field.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from afserve.control.membership.roster import Member, Roster, State, View
from afserve.control.wire.values import (
    PROTOCOL,
    AttentionNodes,
    AttentionPeer,
    Endpoint,
    ExpertPeer,
    Gateways,
    Peers,
    Register,
    Standing,
)
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.errors import RendezvousError
from afserve.member import MODEL_ROLES, AttentionPhase, Life, NodeId, Role

CONTROLLER = "the controller"
OWN_GATEWAY = 0  # the index of the gateway in the controller's process, where there is one
NO_EPOCH = -1
_LIVES = 256  # of one node under one controller: more are not started


def first_generation(life: int) -> int:
    """Of nodes that are new under this controller of the run."""
    return life * _LIVES


class Members:
    """The places of one model. `add` and `remove` change which there are; `admit` fills one."""

    def __init__(self, nodes: tuple[NodeId, ...], version: str, colocated: bool, first: int = 0) -> None:
        """Generations are given out from `first` on."""
        self._roster = Roster(nodes)
        self._generation: dict[NodeId, int] = {}
        self._first = first
        self._version = version
        self._colocated = colocated
        self.own_gateway = not any(node.role is Role.GATEWAY for node in nodes)
        self._agreed: tuple[str, dict[str, str]] | None = None
        self._told: dict[str, tuple[str, str]] = {}  # thing of the checkpoint -> who said first what it is
        self._known_peers: tuple[tuple[int, bool], Peers | None] = ((-1, False), None)

    def __iter__(self) -> Iterator[Member]:
        """Attention nodes first, each role in the order of its indices; who is gone is not among them."""
        return iter([member for role in Role for member in self.living(role)])

    def role_view(self, role: Role) -> View:
        """Who of a role is there, serves or is missing."""
        return self._roster.view_of(role)

    def places(self, role: Role) -> Sequence[NodeId]:
        return self.role_view(role).places

    def living(self, role: Role) -> Sequence[Member]:
        return self.role_view(role).members

    def last_at(self, node: NodeId) -> Member | None:
        """The last member of a place, also one that is gone."""
        return self._roster.last_at(node)

    def find_life(self, member: Life) -> Member | None:
        """None for an earlier life, and for one that is gone."""
        found = self.last_at(member.node)
        return found if found is not None and found.id == member and found.alive else None

    def set_state(self, member: Member, state: State) -> None:
        """`member` is in this state from now on."""
        self._roster.set_state(member, state)

    def add_place(self, role: Role) -> NodeId:
        """A place with the lowest index that is free."""
        taken = {node.index for node in self.places(role)}
        if role is Role.GATEWAY and self.own_gateway:
            taken.add(OWN_GATEWAY)
        node = NodeId(role, next(i for i in range(len(taken) + 1) if i not in taken))
        self._roster.put_member(node, None)
        return node

    def keep_place(self, node: NodeId) -> None:
        """There is such a place, whoever takes it."""
        if node not in self._roster:
            self._roster.put_member(node, None)

    def remove_place(self, node: NodeId) -> None:
        self._roster.remove_place(node)

    def vacancies(self) -> list[NodeId]:
        """Places without a member."""
        return [node for role in Role for node in self.role_view(role).vacancies]

    def vacant(self, node: NodeId) -> bool:
        """Whether there is such a place, and it has no member."""
        member = self.last_at(node)
        return node in self._roster and (member is None or not member.alive)

    def unready(self) -> list[str]:
        """A phrase for everyone that is not ready yet."""
        never = [
            f"{node} {'is gone' if self.last_at(node) else 'never registered'}" for node in self.vacancies()
        ]
        slow = [
            f"{m.node} is at {m.progress.fraction:.0%} ({m.progress.what})"
            for m in self
            if m.state is State.LOADING
        ]
        return never + slow

    def all_ready(self, besides: Collection[NodeId] = ()) -> bool:
        """Nobody is waited for; `besides` are not waited for anyway."""
        views = [self.role_view(role) for role in Role]
        return not any(view.vacancies for view in views) and all(
            member.node in besides for view in views for member in view.unready
        )

    # ---- coming in

    def check_register(self, request: Register, taken: Collection[NodeId] = ()) -> NodeId:
        """The place for whoever asks, none of `taken`. Raises RendezvousError where there is none, or it is another
        afserve."""
        return self._free(self.check_kind(request), request.index, taken)

    def check_kind(self, request: Register) -> Role:
        """Raises RendezvousError for another afserve, and for a role that this run does not have."""
        for what, theirs, ours in (
            ("protocol", request.protocol, PROTOCOL),
            ("version", request.version, self._version),
        ):
            if theirs != ours:
                raise RendezvousError(
                    f"{what}: the node has {theirs}, the controller {ours}; install the same afserve on both"
                )
        try:
            role = Role(request.role)
        except ValueError:
            raise RendezvousError(f"role: {request.role!r} is not one of {', '.join(Role)}") from None
        if self._colocated and role is Role.EXPERT:
            raise RendezvousError(f"role: this run is colocated and has no {role} nodes")
        return role

    def _free(self, role: Role, index: int | None, taken: Collection[NodeId]) -> NodeId:
        places = self.places(role)
        if index is None:
            missing = [node for node in self.role_view(role).vacancies if node not in taken]
            if not missing and role is Role.GATEWAY:
                return self.add_place(role)  # there may be any number of them
            if not missing:
                raise RendezvousError(f"index: all {len(places)} places for {role} nodes are taken")
            return missing[0]
        node = NodeId(role, index)
        if node not in self._roster:
            known = ", ".join(str(place.index) for place in places)
            raise RendezvousError(f"index: {index} is none of the places for {role} nodes, which are {known}")
        if node in taken or not self.vacant(node):
            raise RendezvousError(f"index: {node} is registered already")
        return node

    def admit_member(self, node: NodeId, request: Register, now: float) -> Member:
        generation = max(self._generation.get(node, -1) + 1, self._first)
        return self._seat(node, generation, request, now)

    def readmit(self, node: NodeId, request: Register, standing: Standing, now: float) -> Member:
        """A life that began under another controller. Raises RendezvousError where it disagrees with the others."""
        member = self._seat(node, standing.generation, request, now)
        member.resident_bytes, member.loaded = standing.resident_bytes, standing.loaded
        member.isa = standing.isa
        try:
            if standing.endpoint is not None:
                self.agree(member, standing.endpoint)
            if standing.identity is not None:
                self.identify(member, standing.identity.things)
        except RendezvousError:
            self.set_state(member, State.GONE)
            raise
        return member

    def count_life(self, node: NodeId, generation: int) -> None:
        """There was such a life: the next one of this place comes after it."""
        self._generation[node] = max(generation, self._generation.get(node, -1))

    def _seat(self, node: NodeId, generation: int, request: Register, now: float) -> Member:
        self.count_life(node, generation)
        member = Member(Life(node, generation), request.pid, request.host, now, progress_at=now)
        if node.role in MODEL_ROLES:
            member.stats = ExpertStats() if node.role is Role.EXPERT else AttentionStats()
        self._roster.put_member(node, member)
        return member

    # ---- what all must have in common

    def agree(self, member: Member, endpoint: Endpoint) -> None:
        """Compare what `member` will put on the data plane with what the first member said."""
        self._roster.locate(member, endpoint.address)
        if member.node.role is Role.GATEWAY:
            return  # it is not on the data plane
        if self._agreed is None:
            self._agreed = (str(member.node), dict(endpoint.agreed))
            return
        first, expected = self._agreed
        for key in sorted(expected.keys() | endpoint.agreed.keys()):
            ours, theirs = expected.get(key, "nothing"), endpoint.agreed.get(key, "nothing")
            if ours != theirs:
                raise _disagreement(str(member.node), theirs, first, ours, key)

    def identify(self, member: Member, things: Mapping[str, str]) -> None:
        """Compare what `member`'s host has of the checkpoint, thing by thing, with whoever has the same thing."""
        member.identified = True
        for key, theirs in sorted(things.items()):
            first, ours = self._told.setdefault(key, (str(member.node), theirs))
            if ours != theirs:
                raise _disagreement(str(member.node), theirs, first, ours, key)

    def expect_copy(self, things: Mapping[str, str]) -> None:
        """What the controller's own copy is: the one that all others must have."""
        for key, ours in sorted(things.items()):
            who, theirs = self._told.get(key, (CONTROLLER, ours))
            if ours != theirs:
                raise _disagreement(who, theirs, CONTROLLER, ours, key)
            self._told[key] = (CONTROLLER, ours)

    def check_identified(self, member: Member) -> None:
        """A node that serves has said what its checkpoint is, where there is anything to compare it with."""
        if self._told and not member.identified:
            raise RendezvousError(f"{member.node} is ready, but has not said what it has of the checkpoint")

    def gateways(self) -> Gateways:
        """Where attention nodes reach the gateways. Where none was asked for there is one, at the controller."""
        own = ((OWN_GATEWAY, ""),) if self.own_gateway else ()
        known = [(m.node.index, m.address) for m in self.living(Role.GATEWAY)]
        return Gateways((*own, *((index, address) for index, address in known if address)))

    def attention_nodes(
        self, refusing: str = "", phase: Callable[[int], AttentionPhase] = lambda index: AttentionPhase.BOTH
    ) -> AttentionNodes:
        """For gateways: who serves, in which phase, and who of them takes what is new. `refusing` says why nobody is
        to."""
        return AttentionNodes(
            tuple(
                AttentionPeer(m.id, m.state is State.READY, m.address or "", phase(m.node.index))
                for m in self.role_view(Role.ATTENTION).serving
            ),
            refusing,
        )

    def peers(self, *, settled: bool) -> Peers | None:
        """The expert nodes that rows may be sent to. Before the run has settled all of them, or None.

        Later only those that serve: rows for one that still loads would wait, and may have another place to go.
        """
        key = self.role_view(Role.EXPERT).version, settled
        if key != self._known_peers[0]:  # thousands are told of the same ones: they are one object
            self._known_peers = key, self._peers(settled)
        return self._known_peers[1]

    def _peers(self, settled: bool) -> Peers | None:
        experts = self.role_view(Role.EXPERT)
        known = [m for m in (experts.serving if settled else experts.members) if m.address]
        if not settled and len(known) < len(experts.places):
            return None
        return Peers(tuple(ExpertPeer(m.id, m.address or "") for m in known))


def _disagreement(who: str, theirs: str, first: str, ours: str, what: str) -> RendezvousError:
    return RendezvousError(
        f"{who} disagrees with {first} on {what}: {theirs} against {ours}; "
        "both must read the same checkpoint with the same settings"
    )
