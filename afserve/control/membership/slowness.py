"""Which expert node has become much slower than it was and than its peers: a rule over what heartbeats say.

Slow means: seconds per row and seconds per call are both at least `times` what this node needed before and what its
peers need now. Either alone may come from other work (a few rows per call, or long prompts); noise of a shared machine
reaches all nodes, or does not last. It knows no streams; times are passed in.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from afserve.engine.stats import ExpertStats
from afserve.member import NodeId


@dataclass(frozen=True, slots=True)
class SlowRules:
    """Seconds but for `times`, `rows` and `windows`. One window has at least `rows` rows and lasts at least `window`.

    A node has a past after `windows` of them. It is slow after `lasting` in which each window was.
    """

    times: float = 10.0
    lasting: float = 10.0
    window: float = 2.0
    rows: int = 64
    windows: int = 5
    fresh: float = 10.0  # a peer's last window is compared with for so long
    peers: int = 2


@dataclass(frozen=True, slots=True)
class WindowPace:
    """Of one window: what a row and what a call took, in seconds."""

    at: float
    row: float
    call: float

    def times(self, row: float, call: float) -> float:
        """How often it needs what was needed there."""
        return min(self.row / max(row, 1e-9), self.call / max(call, 1e-9))


@dataclass(slots=True)
class _Known:
    """Of one place on one host; a new process there has the past of the one before."""

    generation: int = -1
    since: float = 0.0
    begun: ExpertStats = field(default_factory=ExpertStats)
    pace: WindowPace | None = None
    past: deque[WindowPace] = field(default_factory=lambda: deque(maxlen=60))
    slow_since: float | None = None


class Slowness:
    """Of all expert nodes. Windows in which a node was slow are no part of its past."""

    def __init__(self, rules: SlowRules | None = None) -> None:
        self._rules = rules or SlowRules()
        self._known: dict[tuple[NodeId, str], _Known] = {}

    def judge_stats(self, node: NodeId, host: str, generation: int, stats: ExpertStats, now: float) -> str:
        """Totals of a life, as a heartbeat says them. Why this node counts as slow; empty while it does not."""
        known = self._known.setdefault((node, host), _Known())
        if known.generation != generation:
            known.generation, known.since, known.begun = generation, now, stats
            known.pace = known.slow_since = None
            return ""
        rows = stats.rows - known.begun.rows
        if now - known.since < self._rules.window or rows < self._rules.rows:
            return ""
        calls, busy = stats.calls - known.begun.calls, stats.busy_seconds - known.begun.busy_seconds
        known.since, known.begun = now, stats
        return self._judge(known, WindowPace(now, busy / rows, busy / max(1, calls)))

    def _judge(self, known: _Known, pace: WindowPace) -> str:
        rules, known.pace = self._rules, pace
        before = self._times(pace, known.past) if len(known.past) >= rules.windows else 0.0
        # Peers are asked about only in the rare case that it is slower than before: there may be a thousand.
        others = self._beside_peers(known, pace) if before >= rules.times else 0.0
        if min(before, others) < rules.times:
            known.slow_since = None
            known.past.append(pace)
            return ""
        if known.slow_since is None:
            known.slow_since = pace.at
        if pace.at - known.slow_since < rules.lasting:
            return ""
        return (
            f"for {pace.at - known.slow_since:.0f} s it has needed {before:.0f} times as long as before, and "
            f"{others:.0f} times as long as its peers, for a row and for a call"
        )

    def _beside_peers(self, known: _Known, pace: WindowPace) -> float:
        peers = self._peers(known, pace.at)
        return self._times(pace, peers) if len(peers) >= self._rules.peers else 0.0

    def _peers(self, known: _Known, now: float) -> list[WindowPace]:
        paces = (other.pace for other in self._known.values() if other is not known)
        return [pace for pace in paces if pace is not None and now - pace.at <= self._rules.fresh]

    @staticmethod
    def _times(pace: WindowPace, others: Iterable[WindowPace]) -> float:
        others = list(others)
        return pace.times(median(other.row for other in others), median(other.call for other in others))
