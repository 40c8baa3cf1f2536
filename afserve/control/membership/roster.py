"""The places of one model and whoever fills them, in order. Lists of them are kept until something changes.

Nearly every event asks who is there and who serves, and hardly any changes it: with thousands of nodes only what
changes may cost a look at all of them. So a member's state and address change here and nowhere else.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from afserve.control.membership.events import Cause
from afserve.control.wire.values import Progress
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.member import Life, NodeId, Role

STARTING = Progress(0.0, "starting")


class State(StrEnum):
    """In this order; any of them may be followed by GONE."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"
    GONE = "gone"


@dataclass(slots=True)
class Member:
    """One life of a node, as it last said. Its roster changes `state` and `address`."""

    id: Life
    pid: int
    host: str
    seen_at: float
    _state: State = State.LOADING
    resident_bytes: int = 0
    _address: str | None = None
    progress: Progress = STARTING
    progress_at: float = 0.0
    identified: bool = False
    loaded: bool = False  # it has said Ready, though it may not serve yet
    expert_error: float | None = None  # of expert weights that it rounded as it loaded them, relative
    dense_error: float | None = None  # the same of its other linear maps
    isa: str = ""  # instruction set of its kernels, on a CPU
    epoch: int = 0  # of the placement that it knows, or NO_EPOCH
    asked: int = 0  # of the one that it was told last, or NO_EPOCH
    stats: AttentionStats | ExpertStats | None = None
    beats: bool = False  # it has said a heartbeat
    why: str = ""  # it is gone; with paths, for the operator
    lost_by: Cause | None = None

    @property
    def node(self) -> NodeId:
        return self.id.node

    @property
    def state(self) -> State:
        return self._state

    @property
    def address(self) -> str | None:
        return self._address

    @property
    def alive(self) -> bool:
        return self._state is not State.GONE

    @property
    def serving(self) -> bool:
        return self._state in (State.READY, State.DRAINING)

    @property
    def owes(self) -> bool:
        """Whether requests run on it, as it last said."""
        return self.serving and isinstance(self.stats, AttentionStats) and self.stats.running > 0


class View:
    """One role between two changes, each part in the order of indices and made when it is first asked for.

    `version` is of a roster's change: two views of one role with the same version are the same.
    """

    def __init__(self, version: int, places: Iterable[tuple[NodeId, Member | None]]) -> None:
        self.version = version
        self._filled = tuple(places)

    @cached_property
    def places(self) -> tuple[NodeId, ...]:
        return tuple(node for node, _ in self._filled)

    @cached_property
    def vacancies(self) -> tuple[NodeId, ...]:
        """Places without a member."""
        return tuple(node for node, m in self._filled if m is None or m._state is State.GONE)

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """Without those who are gone."""
        return tuple(m for _, m in self._filled if m is not None and m._state is not State.GONE)

    @cached_property
    def unready(self) -> tuple[Member, ...]:
        """Who is there and not ready: it loads, or it goes."""
        return tuple(m for m in self.members if m._state is not State.READY)

    @cached_property
    def serving(self) -> tuple[Member, ...]:
        return tuple(m for m in self.members if m.serving)

    @cached_property
    def serving_indices(self) -> frozenset[int]:
        return frozenset(m.node.index for m in self.serving)


class Roster:
    """A place stays when its member goes."""

    def __init__(self, nodes: Iterable[NodeId]) -> None:
        self._places: dict[Role, dict[NodeId, Member | None]] = {role: {} for role in Role}
        self._views: dict[Role, View] = {}
        self._changes = 0
        for node in sorted(nodes):
            self._places[node.role][node] = None

    def __contains__(self, node: NodeId) -> bool:
        return node in self._places[node.role]

    def view_of(self, role: Role) -> View:
        view = self._views.get(role)
        if view is None:
            view = self._views[role] = View(self._changes, self._places[role].items())
        return view

    def last_at(self, node: NodeId) -> Member | None:
        """The last member of a place, also one that is gone."""
        return self._places[node.role].get(node)

    def put_member(self, node: NodeId, member: Member | None) -> None:
        """Who fills a place, which is a new one where there was none."""
        role, new = node.role, node not in self
        self._places[role][node] = member
        if new:
            self._places[role] = dict(sorted(self._places[role].items(), key=lambda place: place[0]))
        self._changed(role)

    def remove_place(self, node: NodeId) -> None:
        if node in self:
            del self._places[node.role][node]
            self._changed(node.role)

    def set_state(self, member: Member, state: State) -> None:
        if member._state is not state:
            member._state = state
            self._changed(member.node.role)

    def locate(self, member: Member, address: str) -> None:
        """Where its peers reach it."""
        if member._address != address:
            member._address = address
            self._changed(member.node.role)

    def _changed(self, role: Role) -> None:
        self._changes += 1
        self._views.pop(role, None)
