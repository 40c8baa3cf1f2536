"""What counts as a loss, and what it means: rules that the membership asks, values in and out.

By the rule `recover` the run goes on without a lost node, and its place is given to a new process, later each time,
for as long as it is wanted. By the rule `end` a loss ends the run, with the reason that the node's parent process saw
if that comes soon.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from afserve.control.membership.events import Cause, Effect, EndRun, Exited, Happening, Incident, Start
from afserve.control.membership.roster import Member
from afserve.control.wire.desired import SILENCE_SECONDS
from afserve.control.wire.values import Stuck, Unheard
from afserve.errors import AfserveError, DeadlineError, DoesNotFitError, PeerLost, UserError
from afserve.member import NodeId, Role

PATIENCE_SECONDS = 15.0  # between two signs of life of a node that owes nobody anything
STALL_SECONDS = 600.0  # between two steps of progress while loading
GATEWAY_SECONDS = 3.0  # between two signs of life of a gateway that serves: its clients wait for it
REGISTER_SECONDS = 60.0  # until a place has a member
SHORT_SECONDS = 2.0  # until new requests are refused because of what is lost and cannot be had elsewhere
EXIT_REPORT_SECONDS = 2.0  # how long a broken stream waits for the reason from whoever started the process

Patience = Callable[[float], float]  # how long somebody may say nothing, from what that is on a quiet host


class OnLoss(StrEnum):
    END = "end"
    RECOVER = "recover"


@dataclass(frozen=True, slots=True)
class Rules:
    """Seconds, but for `restarts`: after so many losses one after another a place counts as failing. What is waited
    before each new process, `backoff`, doubles up to `longest`.

    All are counted while the controller's own process was running. A node is lost after `patience` without a word, by
    the rule `recover` also after `silence` if others wait for its work, after twice that if nobody gets a connection to
    it, after `slow` if they wait although it speaks, and a gateway after `gateway`; all of these on a quiet host
    (`silence.py`). Whoever serves for `proven` has no earlier losses. New requests are refused `short` after something
    is lost that cannot be had elsewhere and that nobody is started for. Running ones, and new ones where somebody is,
    wait for it until their `deadline`.
    """

    on_loss: OnLoss = OnLoss.END
    register: float = REGISTER_SECONDS
    patience: float = PATIENCE_SECONDS
    silence: float = SILENCE_SECONDS
    slow: float = 10.0
    gateway: float = GATEWAY_SECONDS
    stall: float = STALL_SECONDS
    report: float = EXIT_REPORT_SECONDS
    restarts: int = 5
    backoff: float = 0.1
    longest: float = 120.0
    proven: float = 30.0
    short: float = SHORT_SECONDS
    deadline: float = 30.0

    @property
    def recovers(self) -> bool:
        return self.on_loss is OnLoss.RECOVER


@dataclass(slots=True)
class Recovery:
    """Owns what is still to be decided about those who are gone."""

    rules: Rules
    _pending: dict[NodeId, tuple[float, str]] = field(default_factory=dict)  # when its loss counts, why
    _accusers: set[NodeId] = field(default_factory=set)
    _tries: dict[NodeId, int] = field(default_factory=dict)
    _start_at: dict[NodeId, float] = field(default_factory=dict)
    _served_from: dict[NodeId, float] = field(default_factory=dict)

    def plan_restart(
        self, node: NodeId, reason: str, now: float, *, settled: bool, counts: bool = True
    ) -> list[Effect]:
        """A member is gone. Its parent may know better why.

        A run that has never served ends with a node that cannot be started; one that serves goes on without it, and
        tries again, later each time. A loss that does not count is no sign that the next process would be lost too.
        """
        if not self.rules.recovers:
            self._pending.setdefault(node, (now + self.rules.report, reason))
            return []
        if now - self._served_from.pop(node, now) >= self.rules.proven:
            self._tries.pop(node, None)
        tries = self._tries[node] = self._tries.get(node, 0) + counts
        if tries > self.rules.restarts and not settled:
            return [EndRun(PeerLost(node, f"{reason}; it was started {tries} times"))]
        pause = self._pause(tries)
        self._start_at[node] = now + pause
        if tries <= self.rules.restarts or not counts:
            return []
        why = f"{reason}; it was lost {tries} times"
        did = f"it is tried again in {pause:.0f} s, and at once by `afserve restart {node}`"
        return [Incident(Happening.FAILING, node, why, did=did)]

    def _pause(self, tries: int) -> float:
        return min(self.rules.backoff * 2.0 ** min(max(0, tries - 1), 30), self.rules.longest)

    def is_failing(self, node: NodeId) -> bool:
        """Whether its processes were lost so often that the next one cannot be counted on."""
        return self._tries.get(node, 0) > self.rules.restarts

    def pauses(self, node: NodeId) -> bool:
        """Whether its place waits for its next process."""
        return node in self._start_at

    def hasten(self, node: NodeId, now: float) -> None:
        """Somebody asks for it: what it waits for is tried at once, as if for the first time."""
        if node in self._start_at:
            self._tries.pop(node, None)
            self._start_at[node] = now

    def unproductive(
        self, member: Member, said: Stuck, asker: NodeId, now: float, patience: Patience
    ) -> tuple[str, Cause]:
        """Why a member that owes `asker` an answer counts as lost; empty while it does not."""
        rules, silent = self.rules, now - member.seen_at
        if not rules.recovers or said.seconds < rules.silence:
            return "", Cause.SLOW
        owes = f"it has owed {asker} an answer for {said.seconds:.1f} s"
        if silent >= rules.silence:
            over = min(silent, said.seconds) >= patience(rules.silence)
            return f"{owes} and said nothing for {silent:.1f} s" if over else "", Cause.SILENT
        late = said.seconds >= rules.slow and not said.unreachable and said.seconds >= patience(rules.slow)
        return owes + ", although it still speaks" if late else "", Cause.SLOW

    def unheard(self, member: Member, said: Unheard, asker: str, now: float, patience: Patience) -> str:
        """Why an attention node with requests of `asker` counts as lost, whatever it last said that it has."""
        rules, silent = self.rules, now - member.seen_at
        waited = min(said.seconds, silent)
        if not rules.recovers or waited < rules.silence or waited < patience(rules.silence):
            return ""
        return f"{asker} has requests there, and it said nothing for {silent:.1f} s"

    def silent(self, member: Member, now: float, patience: Patience) -> str:
        """Why a member that says nothing counts as lost; empty while it does not."""
        rules, silent = self.rules, now - member.seen_at
        limit = rules.patience
        if rules.recovers and member.owes:
            limit = rules.silence
        elif rules.recovers and member.serving and member.node.role is Role.GATEWAY:
            limit = rules.gateway
        return f"silent for {silent:.1f} s" if silent > limit and silent > patience(limit) else ""

    def accused(self, node: NodeId, message: str, now: float) -> None:
        """`node` gave up because of another one, whose own end is the reason if it is reported soon."""
        self._accusers.add(node)
        if not self.rules.recovers:
            self._pending.setdefault(node, (now + self.rules.report, message))

    def exited(self, event: Exited) -> list[Effect]:
        """Nothing where its stream's end is all that counts, or where its own end is not the reason."""
        if not self.rules.recovers and event.node not in self._accusers:
            return [EndRun(PeerLost(event.node, event.reason))]
        return []

    def explain_failure(self, node: NodeId, error: AfserveError) -> AfserveError:
        """The node's own error where the user can act on it, else the loss of the node with its reason."""
        if isinstance(error, UserError | DoesNotFitError):
            return type(error)(f"{node}: {error.message}", param=error.param)
        return PeerLost(node, error.message)

    def awaits(self, node: NodeId) -> bool:
        """Whether somebody was started for its place and is to join, so that the end of that one is a loss."""
        return self.rules.recovers and not self.pauses(node)

    def forget_place(self, node: NodeId) -> None:
        """Its place is taken, or nobody wants it any more."""
        self._start_at.pop(node, None)
        self._pending.pop(node, None)
        self._accusers.discard(node)

    def pardon(self, node: NodeId) -> None:
        """Its next loss is a first one."""
        self._tries.pop(node, None)

    def serves(self, node: NodeId, now: float) -> None:
        """From now on; once it has done so for long enough, its next loss is a first one."""
        self._served_from[node] = now

    def restarts_due(self, now: float) -> list[Effect]:
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
