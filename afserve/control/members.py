"""Who belongs to the run and how each one is: the controller's table, with the checks of a rendezvous.

It knows no gRPC and no clock; times are passed in. A mismatch names the node and the field.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from afserve.control.values import PROTOCOL, ROLES, Endpoint, Progress, Register, Run, node_name
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.errors import RendezvousError

LOADING, READY, DRAINING, DRAINED, GONE = "loading", "ready", "draining", "drained", "gone"


STARTING = Progress(0.0, "starting")


@dataclass(slots=True)
class Member:
    """One node as the controller sees it. `outbox` holds what is still to be sent to it."""

    role: str
    index: int
    pid: int
    host: str
    seen_at: float
    state: str = LOADING
    resident_bytes: int = 0
    address: str | None = None
    progress: Progress = STARTING
    stats: AttentionStats | ExpertStats = field(default_factory=AttentionStats)
    progress_at: float = 0.0
    outbox: "asyncio.Queue[bytes]" = field(default_factory=asyncio.Queue)

    @property
    def name(self) -> str:
        return node_name(self.role, self.index)

    @property
    def alive(self) -> bool:
        return self.state != GONE


class Members:
    """The members of one run. Raises RendezvousError for a node that does not fit in."""

    def __init__(self, run: Run, version: str) -> None:
        self._run = run
        self._version = version
        self._by_name: dict[str, Member] = {}
        self._agreed: tuple[str, dict[str, str]] | None = None

    def __iter__(self) -> Iterator[Member]:
        """In the run's order: attention nodes first."""
        return iter([self._by_name[name] for name in self._run.members if name in self._by_name])

    def get(self, role: str, index: int) -> Member | None:
        return self._by_name.get(node_name(role, index))

    def of(self, role: str) -> list[Member]:
        return [member for member in self if member.role == role]

    def missing(self) -> list[str]:
        """Names that never registered."""
        return [name for name in self._run.members if name not in self._by_name]

    def unready(self) -> list[str]:
        """A phrase for everyone that is not ready yet."""
        never = [f"{name} never registered" for name in self.missing()]
        slow = [
            f"{m.name} is at {m.progress.fraction:.0%} ({m.progress.what})"
            for m in self
            if m.state == LOADING
        ]
        return never + slow

    @property
    def all_ready(self) -> bool:
        return not self.missing() and all(member.state == READY for member in self)

    def admit(self, request: Register, now: float) -> Member:
        self._check(request)
        member = Member(request.role, self._place(request), request.pid, request.host, now)
        member.progress_at = now
        if request.role == "expert":
            member.stats = ExpertStats()
        self._by_name[member.name] = member
        return member

    def agree(self, member: Member, endpoint: Endpoint) -> None:
        """Compare what `member` will put on the data plane with what the first member said."""
        member.address = endpoint.address
        if self._agreed is None:
            self._agreed = (member.name, dict(endpoint.agreed))
            return
        first, expected = self._agreed
        for key in sorted(expected.keys() | endpoint.agreed.keys()):
            ours, theirs = expected.get(key, "nothing"), endpoint.agreed.get(key, "nothing")
            if ours != theirs:
                raise RendezvousError(
                    f"{member.name} disagrees with {first} on {key}: {theirs} against {ours}; "
                    "both must read the same checkpoint with the same settings"
                )

    def addresses(self) -> tuple[str, ...] | None:
        """The expert nodes' mailboxes in order, once all are known."""
        experts = self.of("expert")
        known = tuple(member.address for member in experts if member.address)
        return known if len(known) == self._run.expert_nodes else None

    def _check(self, request: Register) -> None:
        for what, theirs, ours in (
            ("protocol", request.protocol, PROTOCOL),
            ("version", request.version, self._version),
        ):
            if theirs != ours:
                raise RendezvousError(
                    f"{what}: the node has {theirs}, the controller {ours}; install the same afserve on both"
                )
        if request.role not in ROLES:
            raise RendezvousError(f"role: {request.role!r} is not one of {', '.join(ROLES)}")
        if not self._run.count(request.role):
            raise RendezvousError(f"role: this run is colocated and has no {request.role} nodes")

    def _place(self, request: Register) -> int:
        count = self._run.count(request.role)
        taken = {member.index for member in self.of(request.role)}
        if request.index is None:
            free = [index for index in range(count) if index not in taken]
            if not free:
                raise RendezvousError(f"index: all {count} places for {request.role} nodes are taken")
            return free[0]
        if request.index >= count:
            raise RendezvousError(
                f"index: {request.index} is outside [0, {count - 1}] for {request.role} nodes"
            )
        if request.index in taken:
            raise RendezvousError(f"index: {node_name(request.role, request.index)} is registered already")
        return request.index
