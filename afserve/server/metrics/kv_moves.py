"""What /metrics says of KV blocks that move between attention nodes."""

from collections.abc import Iterable, Iterator

from afserve.control.wire.view_values import NodeView
from afserve.engine.stats import AttentionStats
from afserve.metrics import MetricFamily, Sample, gauge

_TOTALS = (
    ("kv_pulls", "Requests whose KV was asked of another node.", "pulls"),
    ("kv_pulls_failed", "Those of which not everything came in time.", "pulls_failed"),
    ("kv_pull_seconds", "Time that moved requests waited for their KV.", "pull_seconds"),
    ("kv_recomputed_tokens", "Tokens computed again because their KV did not come.", "recomputed_tokens"),
    ("kv_leases_lapsed", "Leases of blocks that nobody renewed.", "lapsed"),
    ("kv_copied_blocks", "Blocks of running requests that another node keeps a copy of.", "copied_blocks"),
    ("prompts_handed_over", "Prompts that another node computed for this one.", "handed"),
    (
        "prompts_handed_over_short",
        "Those that did not come whole; the rest was computed here.",
        "handed_short",
    ),
    ("hand_over_seconds", "Time from a request to the last block of its prompt.", "hand_seconds"),
    ("prompts_straight", "Prompts that a decode node computed because that was sooner.", "straight"),
    ("prompts_for_others", "Prompts that this node computed for others.", "prompts"),
    ("prompts_split", "Prompts that this node computed together with other prefill nodes.", "split"),
    (
        "prompts_split_short",
        "Those that another node left; the rest was computed here.",
        "split_short",
    ),
    ("prompt_parts", "Prompts of other prefill nodes that this node computed a part of.", "parts"),
    ("kv_copy_hits", "Copied blocks that a request was continued with.", "copy_hits"),
)


def moved_kv(nodes: list[tuple[str, AttentionStats]]) -> Iterator[MetricFamily]:
    yield MetricFamily(
        ("afserve_kv_bytes",),
        "counter",
        "Bytes of KV blocks that left a node for another one, or came.",
        tuple(
            Sample(value, (("node", name), ("way", way)), "_total")
            for name, stats in nodes
            for way, value in (("sent", stats.kv.bytes_sent), ("received", stats.kv.bytes_received))
        ),
    )
    for name, help, field in _TOTALS:
        samples = tuple(
            Sample(getattr(stats.kv, field), (("node", node),), "_total") for node, stats in nodes
        )
        yield MetricFamily((f"afserve_{name}",), "counter", help, samples)
    for name, help, field in (
        ("kv_leased_blocks", "Blocks held for another node that pulls them.", "leased"),
        (
            "kv_oldest_lease_seconds",
            "Time that blocks have been held for another node, at most.",
            "oldest_lease",
        ),
        ("kv_copies_held", "Cached blocks that are kept for another node.", "copies"),
    ):
        yield gauge(
            (f"afserve_{name}",),
            help,
            [((("node", node),), getattr(stats.kv, field)) for node, stats in nodes],
        )


_QUEUES = (
    ("phase_requests_running", "Sequences on the nodes of a phase.", "running"),
    ("phase_requests_waiting", "Sequences that wait for a place on the nodes of a phase.", "waiting"),
    ("phase_queued_tokens", "Prompt tokens still to be computed on the nodes of a phase.", "queued_tokens"),
)
_FIELDS = tuple(field for *_, field in _QUEUES)


def queues(nodes: Iterable[NodeView]) -> dict[str, dict[str, int]]:
    """By phase: its attention nodes, what runs and waits there, and the prompt tokens still to be computed."""
    found: dict[str, dict[str, int]] = {}
    for node in nodes:
        if isinstance(node.stats, AttentionStats):
            phase = found.setdefault(node.phase, {"nodes": 0, **dict.fromkeys(_FIELDS, 0)})
            phase["nodes"] += 1
            for field in _FIELDS:
                phase[field] += getattr(node.stats, field)
    return dict(sorted(found.items()))


def by_phase(nodes: Iterable[NodeView]) -> Iterator[MetricFamily]:
    """Queues of prefill, decode and other attention nodes."""
    phases = queues(nodes)
    for name, help, field in _QUEUES:
        values = [((("phase", phase),), of[field]) for phase, of in phases.items()]
        yield gauge((f"afserve_{name}",), help, values)
