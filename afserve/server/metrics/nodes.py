"""Families of /metrics, and figures of /status, made of what nodes count as it is declared (`afserve/counters.py`)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from afserve.control.wire.view_values import COMPARED, ClusterView, NodeView, PilotView
from afserve.counters import DeclaredCounter, Metric, Over, counters_of
from afserve.engine.stats import KINDS, AttentionStats
from afserve.metrics import Labels, MetricFamily, Sample, gauge, totals
from afserve.placement.expert_memory import verdict

Declared = list[tuple[DeclaredCounter, Metric]]
_SERVING = ("ready", "draining")
_NOTHING: Mapping[str, int] = {}
_REFUSED = "Requests refused at once because what they ask for was predicted to be missed."
_STALLED = (
    "Time that work stood still because of a loss, summed over dispatches (cause moved: over requests)."
)


def both(name: str) -> tuple[str, str]:
    return f"afserve_{name}", f"vllm:{name}"


def counted(nodes: Sequence[NodeView], beside: Mapping[str, int] = _NOTHING) -> Iterator[MetricFamily]:
    """Every declared family. One that is about a part that no node has is left out. `beside` is added to sums over all
    nodes, by the family's name."""
    for kind in KINDS.values():
        found: dict[str, Declared] = {}
        for declared in counters_of(kind):
            for metric in declared.metrics:
                found.setdefault(metric.name, []).append((declared, metric))
        own = [node for node in nodes if isinstance(node.stats, kind)]
        for name, parts in found.items():
            metric = parts[0][1]
            values = list(_values(own, parts, beside.get(name, 0)))
            if values or not metric.where:
                names = both(name) if metric.over is Over.MODEL else (f"afserve_{name}",)
                suffix = "_total" if metric.kind == "counter" else ""
                samples = tuple(Sample(value, labels, suffix) for labels, value in values)
                yield MetricFamily(names, metric.kind, metric.help, samples)
    yield _found_by_tier(nodes)


def _found_by_tier(nodes: Sequence[NodeView]) -> MetricFamily:
    stats = [(node.name, node.stats) for node in nodes if isinstance(node.stats, AttentionStats)]
    found = [
        ((("node", name), ("tier", tier)), tokens) for name, of in stats for tier, tokens in of.hits.items()
    ]
    return totals("afserve_kv_hit_tokens", "Prompt tokens whose KV was found, by where it was.", found)


def hot_set(nodes: Sequence[NodeView]) -> str | None:
    """What traffic makes of memory for some of the experts; None where no node has such a memory."""
    kept = [node.stats.experts for node in nodes if node.stats is not None]
    return verdict(kept) if any(one.capacity for one in kept) else None


def _values(nodes: Sequence[NodeView], parts: Declared, beside: int) -> Iterator[tuple[Labels, float]]:
    over = parts[0][1].over
    if over is Over.MODEL:
        for declared, metric in parts:
            yield metric.labels, beside + sum(declared.read(node.stats) for node in nodes)
        return
    if over is Over.PHASE:
        for declared, metric in parts:
            for phase, of in _by_phase(nodes).items():
                yield (("phase", phase), *metric.labels), sum(declared.read(node.stats) for node in of)
        return
    for node in nodes:
        for declared, metric in parts:
            if declared.is_drawn(node.stats, metric):
                yield (("node", node.name), *metric.labels), declared.read(node.stats)


def _by_phase(nodes: Iterable[NodeView]) -> dict[str, list[NodeView]]:
    found: dict[str, list[NodeView]] = {}
    for node in nodes:
        if isinstance(node.stats, AttentionStats):
            found.setdefault(node.phase, []).append(node)
    return dict(sorted(found.items()))


def queues(nodes: Iterable[NodeView]) -> dict[str, dict[str, int]]:
    """By phase: its attention nodes, and what is declared to be added up over a phase."""
    queued = [each for each in counters_of(AttentionStats) if any(m.over is Over.PHASE for m in each.metrics)]
    return {
        phase: {"nodes": len(of), **{each.name: sum(each.read(n.stats) for n in of) for each in queued}}
        for phase, of in _by_phase(nodes).items()
    }


def hits(nodes: Iterable[NodeView]) -> dict[str, int]:
    """Prompt tokens whose KV was found, by tier, of all attention nodes; empty without any."""
    found: Counter[str] = Counter()
    for node in nodes:
        if isinstance(node.stats, AttentionStats):
            found.update(node.stats.hits)
    return dict(found)


def losses(view: ClusterView) -> Iterator[MetricFamily]:
    """Of lost nodes: how many, what was sent, loaded and moved again, and how long work waited.

    All counts are of the whole run, but `moved` and `refused`, which are of the gateway that is asked.
    """
    lost = [
        ((("role", role), ("cause", cause)), count)
        for role, causes in sorted(view.lost.items())
        for cause, count in sorted(causes.items())
    ]
    yield totals("afserve_nodes_lost", "Nodes lost while they served, by what it was noticed by.", lost)
    reloaded = "Bytes of weights read because experts were placed anew."
    yield totals("afserve_expert_bytes_reloaded", reloaded, [((), view.reloaded_bytes)])
    resent = "Rows sent again because an expert node was lost."
    yield totals("afserve_rows_resent", resent, [((), view.resent_rows)])
    for name, label, counted, help in (
        ("requests_moved", "cause", view.moved, "Requests that went on at another attention node."),
        ("requests_refused", "reason", view.refused, _REFUSED),
        ("stall_seconds", "cause", view.stalled, _STALLED),
    ):
        yield totals(f"afserve_{name}", help, ((((label, why),), n) for why, n in sorted(counted.items())))
    serving = Counter(node.role for node in view.nodes if node.state in _SERVING)
    for name, help, counts in (
        ("wanted", "Nodes that there should be.", view.wanted),
        ("serving", "Nodes that serve.", {role: serving[role] for role in (*view.wanted, *serving)}),
    ):
        samples = [((("role", role),), count) for role, count in sorted(counts.items())]
        yield gauge((f"afserve_nodes_{name}",), help, samples)


def piloted(pilot: PilotView | None) -> Iterator[MetricFamily]:
    """What a pilot advised, how often it was right, and what it goes by; nothing without one."""
    if pilot is None:
        return
    advised = [((("pool", pool),), count) for pool, count in pilot.advised.items()]
    yield gauge(("afserve_pilot_advised_nodes",), "Nodes of a pool, as the pilot advised last.", advised)
    counts = [((("what", what),), count) for what, count in pilot.counts.items()]
    said = "What the pilot did: advised, followed, compared with what happened, held its interval, refused."
    yield totals("afserve_pilot_advices", said, counts)
    for name, help in (
        ("rate", "Requests per second over the last minute, as the pilot sees them."),
        ("rate_soon", "The most requests per second that the pilot expects soon."),
    ):
        value = [((), pilot.figures[name])] if name in pilot.figures else []
        yield gauge((f"afserve_pilot_{name}",), help, value)
    said = (
        "Of the newest advice that was compared: the 80 % interval that was expected, and what was measured."
    )
    compared = [
        (tuple(zip(("time", "what"), key.removeprefix(COMPARED).split("_"), strict=True)), seconds)
        for key, seconds in pilot.figures.items()
        if key.startswith(COMPARED)
    ]
    yield gauge(("afserve_pilot_compared_seconds",), said, compared)
