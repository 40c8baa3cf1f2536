"""What a loss means: rules that the membership asks, values in and out.

Today a lost node ends the run, with the reason that its parent process saw if that comes soon. The other rule, which no
command chooses yet, gives the place to a new process, later each time, a bounded number of times.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from afserve.control.membership.events import Effect, EndRun, Exited, Start
from afserve.errors import AfserveError, DeadlineError, DoesNotFitError, PeerLost, UserError
from afserve.member import NodeId

SILENCE_SECONDS = 15.0  # between two signs of life of one node, while the controller's process was running
STALL_SECONDS = 600.0  # between two steps of progress while loading
REGISTER_SECONDS = 60.0  # until a place has a member
EXIT_REPORT_SECONDS = 2.0  # how long a broken stream waits for the reason from whoever started the process


class OnLoss(StrEnum):
    END = "end"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Rules:
    """Seconds, but for `restarts`: how often a place may be filled anew. `backoff` doubles up to `longest`."""

    on_loss: OnLoss = OnLoss.END
    register: float = REGISTER_SECONDS
    silence: float = SILENCE_SECONDS
    stall: float = STALL_SECONDS
    report: float = EXIT_REPORT_SECONDS
    restarts: int = 5
    backoff: float = 0.5
    longest: float = 30.0


@dataclass(slots=True)
class Recovery:
    """Owns what is still to be decided about those who are gone."""

    rules: Rules
    _pending: dict[NodeId, tuple[float, str]] = field(default_factory=dict)  # when its loss counts, why
    _accusers: set[NodeId] = field(default_factory=set)
    _tries: dict[NodeId, int] = field(default_factory=dict)
    _start_at: dict[NodeId, float] = field(default_factory=dict)

    def lost(self, node: NodeId, reason: str, now: float) -> list[Effect]:
        """A member is gone. Its parent may know better why."""
        if self.rules.on_loss is OnLoss.END:
            self._pending.setdefault(node, (now + self.rules.report, reason))
            return []
        tries = self._tries[node] = self._tries.get(node, 0) + 1
        if tries > self.rules.restarts:
            return [EndRun(PeerLost(node, f"{reason}; it was started {tries} times"))]
        self._start_at[node] = now + min(self.rules.backoff * 2.0 ** min(tries - 1, 30), self.rules.longest)
        return []

    def accused(self, node: NodeId, message: str, now: float) -> None:
        """`node` gave up because of another one, whose own end is the reason if it is reported soon."""
        self._accusers.add(node)
        if self.rules.on_loss is OnLoss.END:
            self._pending.setdefault(node, (now + self.rules.report, message))

    def exited(self, event: Exited) -> list[Effect]:
        """Nothing where its stream's end is all that counts, or where its own end is not the reason."""
        if self.rules.on_loss is OnLoss.END and event.node not in self._accusers:
            return [EndRun(PeerLost(event.node, event.reason))]
        return []

    def failed(self, node: NodeId, error: AfserveError) -> AfserveError:
        """The node's own error where the user can act on it, else the loss of the node with its reason."""
        if isinstance(error, UserError | DoesNotFitError):
            return type(error)(f"{node}: {error.message}", param=error.param)
        return PeerLost(node, error.message)

    def forget(self, node: NodeId) -> None:
        """Its place is taken, or nobody wants it any more."""
        self._start_at.pop(node, None)
        self._pending.pop(node, None)
        self._accusers.discard(node)

    def settled(self, node: NodeId) -> None:
        """It serves: its next loss is a first one."""
        self._tries.pop(node, None)

    def due(self, now: float) -> list[Effect]:
        """What time alone brings about."""
        for node, (at, reason) in self._pending.items():
            if now >= at:
                return [EndRun(PeerLost(node, reason))]
        started = [node for node, at in self._start_at.items() if now >= at]
        for node in started:
            del self._start_at[node]
        return [Start(node) for node in sorted(started)]

    def late(self, nodes: list[str], seconds: float) -> AfserveError:
        return DeadlineError(f"not ready after {seconds:.0f} s: {'; '.join(nodes)}")
