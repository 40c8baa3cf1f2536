"""What the charts of the page show of the time before it was opened. It knows no streams."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from afserve.control.wire.view_values import NodeView
from afserve.engine.stats import AttentionStats
from afserve.server.metrics.key_meter import KeyCounts

KEPT_SECONDS = 600.0
LATENCIES = ("first_token", "inter_token")
Quantiles = Mapping[str, float] | None
KeyFigures = Mapping[str, KeyCounts]
_NO_KEYS: KeyFigures = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Moment:
    """`rates` of all attention nodes together, per second and by name; `kv` the share of blocks in use by node; `keys`
    the share of prompt tokens found by key, of keys that asked; `latency` in seconds by name and quantile, None where
    nothing was answered."""

    at: float
    rates: Mapping[str, float]
    kv: Mapping[str, float]
    keys: Mapping[str, float]
    latency: Mapping[str, Quantiles]


class History:
    """Ten minutes of one model at one gateway. Bounded: no moment is older than KEPT_SECONDS."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque()
        self._before: tuple[float, Mapping[str, Mapping[str, int]]] | None = None
        self._keys = _NO_KEYS

    def add_sample(
        self,
        at: float,
        nodes: Sequence[NodeView],
        latency: Mapping[str, Quantiles],
        keys: KeyFigures = _NO_KEYS,
    ) -> None:
        """`at` in Unix seconds. A node that was started anew counts from zero."""
        stats = {node.name: node.stats for node in nodes if isinstance(node.stats, AttentionStats)}
        counts = {name: _counted(one) for name, one in stats.items()}
        then, before = (at, counts) if self._before is None else self._before
        known, self._before = self._keys, (at, counts)
        self._keys = {**known, **keys}  # a key that comes back goes on from what it had
        if then >= at:
            return
        rates = dict.fromkeys(_counted(AttentionStats()), 0.0)
        for node, now in counts.items():
            for name, count in now.items():
                rates[name] += max(0, count - before.get(node, now)[name]) / (at - then)
        kv = {name: one.kv_blocks_used / one.kv_blocks for name, one in stats.items() if one.kv_blocks}
        self._moments.append(Moment(at, rates, kv, _shares(known, keys), dict(latency)))
        while self._moments[0].at < at - KEPT_SECONDS:
            self._moments.popleft()

    def columns(self) -> dict[str, object]:
        """One list a series, oldest first; None where a moment has no such value."""
        moments = self._moments
        return {
            "at": [moment.at for moment in moments],
            "rates": {name: [one.rates[name] for one in moments] for name in _counted(AttentionStats())},
            "kv": _columns([moment.kv for moment in moments]),
            "keys": _columns([moment.keys for moment in moments]),
            **{name: [moment.latency.get(name) for moment in moments] for name in LATENCIES},
        }


def _counted(one: AttentionStats) -> Mapping[str, int]:
    """Tokens generated, tokens of prompts, and those of prompts that were found, by tier."""
    return {"generated": one.generated_tokens, "prompt": one.prompt_tokens, **one.hits}


def _shares(before: KeyFigures, now: KeyFigures) -> dict[str, float]:
    found = {}
    for key, counts in now.items():
        then = before.get(key, KeyCounts())
        if counts.asked > then.asked:
            found[key] = max(0, counts.found - then.found) / (counts.asked - then.asked)
    return found


def _columns(moments: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    names = sorted({name for moment in moments for name in moment})
    return {name: [moment.get(name) for moment in moments] for name in names}
