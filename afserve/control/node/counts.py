"""Draws what an attention node counts as curves of its trace: queue, where KV was found, what moved, leases.

The numbers are those of its heartbeats. Counts that are as they were are not drawn again.
"""

from collections.abc import Callable, Mapping

from afserve.adviser import Adviser
from afserve.clock import Clock, MonotonicClock
from afserve.engine.stats import AttentionStats
from afserve.tracing.trace import Trace


class DrawnCounts:
    """`stats`, which also draws what it returns."""

    def __init__(self, stats: Callable[[], AttentionStats], trace: Trace, clock: Clock | None = None) -> None:
        self._stats, self._trace, self._clock = stats, trace, clock or MonotonicClock()
        self._drawn: dict[str, Mapping[str, int]] = {}
        self._advice = Adviser("drawing what this node counts")

    def __call__(self) -> AttentionStats:
        stats, now = self._stats(), self._clock.now()
        self._advice.ask(now, lambda: self._draw(stats, now), None)
        return stats

    def _draw(self, stats: AttentionStats, now: float) -> None:
        for name, values in curves(stats).items():
            if self._drawn.get(name) != values:
                self._drawn[name] = values
                self._trace.counts(name, values, now)


def curves(stats: AttentionStats) -> dict[str, dict[str, int]]:
    """By picture. Prompt tokens found and bytes are totals; a lease and the mean hand-over are in milliseconds."""
    kv, tiers = stats.kv, stats.tiers
    found = {
        "requests": {"running": stats.running, "waiting": stats.waiting},
        "prompt tokens queued": {"tokens": stats.queued_tokens},
        "prompt tokens found": stats.hits,
        "KV bytes moved": {"sent": kv.bytes_sent, "received": kv.bytes_received},
        "oldest KV lease, ms": {"lease": round(1e3 * kv.oldest_lease)},
    }
    if stats.drafts.verified:
        found["draft tokens"] = {"drafted": stats.drafts.tokens, "accepted": stats.drafts.accepted}
    if kv.handed:
        found["mean hand-over, ms"] = {"hand-over": round(1e3 * kv.hand_seconds / kv.handed)}
    if tiers.host.capacity:
        host = tiers.host
        found["host memory, bytes"] = {"read": host.bytes_read, "written": host.bytes_written}
    if tiers.capacity:
        found["disk, bytes"] = {"read": tiers.bytes_read, "written": tiers.bytes_written}
    return found
