"""What the controller remembers of its own lateness, of its host, and of silences that members came back from.

`silence` decides; this gathers what it decides by. Times are passed in.
"""

from collections import deque
from collections.abc import Callable

from afserve.control.membership.members import Members
from afserve.control.membership.roster import Member
from afserve.control.membership.silence import HostLoad, SilenceRules, SilenceSigns, patience, stretch
from afserve.member import AttentionPhase, NodeId, Role

_STARVED_TIMES, _STARVED_LATE = 2.0, 0.25  # from here on a silence says little about who is silent


class Lately:
    """The largest of some numbers over the last `memory` seconds."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._kept: deque[tuple[float, float]] = deque()  # when, what; falling

    def note_value(self, value: float, now: float) -> None:
        while self._kept and self._kept[-1][1] <= value:
            self._kept.pop()  # smaller and older: it never counts again
        self._kept.append((now, value))

    def largest(self, now: float) -> float:
        while self._kept and self._kept[0][0] < now - self._memory:
            self._kept.popleft()
        return self._kept[0][1] if self._kept else 0.0


class Watch:
    """`silence` in seconds is what a member may say nothing on a quiet host while others wait for it; `phase` says what
    an attention node does."""

    def __init__(
        self,
        members: Members,
        silence: float,
        phase: Callable[[int], AttentionPhase],
        rules: SilenceRules | None = None,
    ) -> None:
        self._members, self._silence, self._phase = members, silence, phase
        self._rules = rules or SilenceRules()
        self._pressure: float | None = None
        self._late = Lately(self._rules.memory)
        self._gaps: dict[NodeId, Lately] = {}

    def note_load(self, load: HostLoad, now: float) -> None:
        """Several times a second, with what this process knows of itself and of its host."""
        self._pressure = load.pressure
        self._late.note_value(load.late, now)

    def note_heartbeat(self, member: Member, now: float) -> None:
        """A heartbeat, before `seen_at` is that of now. Longer gaps than usual are remembered."""
        gap = now - member.seen_at
        if member.beats and gap >= self._silence / 2:
            self._gaps.setdefault(member.node, Lately(self._rules.memory)).note_value(gap, now)

    def patience(self, member: Member, limit: float, now: float) -> float:
        """How long it may say nothing, where `limit` is for a quiet host."""
        others = [other for other in self._members if other is not member and other.beats]
        gap = self._gaps.get(member.node)
        signs = SilenceSigns(
            late=self._late.largest(now),
            pressure=self._pressure,
            silent=sum(now - other.seen_at >= self._silence for other in others),
            watched=len(others),
            gap=0.0 if gap is None else gap.largest(now),
            last=self._is_last(member),
        )
        return patience(limit, signs, self._rules)

    def _is_last(self, member: Member) -> bool:
        """Whether nobody else does what this one does."""
        role = member.node.role
        if role is Role.GATEWAY and self._members.own_gateway:
            return False
        others = [m for m in self._members.role_view(role).serving if m is not member]
        if role is not Role.ATTENTION:
            return not others
        mine = self._phase(member.node.index)
        return not any(self._phase(m.node.index) in (mine, AttentionPhase.BOTH) for m in others)

    def stretch(self, now: float) -> float:
        """How many times as long all else may take that is bounded in time, such as the start of a process."""
        return stretch(self._late.largest(now), self._pressure, self._rules)

    def starves(self, now: float) -> bool:
        """Whether this host is so busy that silence says little about who is silent."""
        return self.stretch(now) >= _STARVED_TIMES or self._late.largest(now) >= _STARVED_LATE
