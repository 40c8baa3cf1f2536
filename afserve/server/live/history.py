"""What the charts of the page show of the ten minutes before it was opened. Values in, values out.

A moment is made of a status and of the latencies at that time; its rates are those since the moment before.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afserve.control.wire.view_values import NodeView
from afserve.engine.stats import AttentionStats

KEPT_SECONDS = 600.0
LATENCIES = ("first_token", "inter_token")
Quantiles = Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Moment:
    """`generated` and `prompt` in tokens per second over all attention nodes; `kv` the share of blocks in use by node;
    `latency` in seconds by name and quantile, None where nothing was answered."""

    at: float
    generated: float
    prompt: float
    kv: Mapping[str, float]
    latency: Mapping[str, Quantiles]


class History:
    """Of one model, at one gateway. Bounded: no moment is older than KEPT_SECONDS."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque()
        self._before: tuple[float, Mapping[str, AttentionStats]] | None = None

    def add_sample(self, at: float, nodes: Sequence[NodeView], latency: Mapping[str, Quantiles]) -> None:
        """`at` in Unix seconds. A node that was started anew counts from zero."""
        stats: Mapping[str, AttentionStats] = {
            node.name: node.stats for node in nodes if isinstance(node.stats, AttentionStats)
        }
        then, before = (at, stats) if self._before is None else self._before
        self._before = at, stats
        if then >= at:
            return

        def rate(name: str) -> float:
            grown = 0.0
            for node, now in stats.items():
                grown += max(0, getattr(now, name) - getattr(before.get(node, now), name))
            return grown / (at - then)

        kv = {node: now.kv_blocks_used / now.kv_blocks for node, now in stats.items() if now.kv_blocks}
        self._moments.append(Moment(at, rate("generated_tokens"), rate("prompt_tokens"), kv, dict(latency)))
        while self._moments[0].at < at - KEPT_SECONDS:
            self._moments.popleft()

    def columns(self) -> dict[str, object]:
        """One list a series, oldest first; None where a moment has no such value."""
        moments = self._moments
        names = sorted({name for moment in moments for name in moment.kv})
        return {
            "at": [moment.at for moment in moments],
            "generated": [moment.generated for moment in moments],
            "prompt": [moment.prompt for moment in moments],
            "kv": {name: [moment.kv.get(name) for moment in moments] for name in names},
            **{name: [moment.latency.get(name) for moment in moments] for name in LATENCIES},
        }
