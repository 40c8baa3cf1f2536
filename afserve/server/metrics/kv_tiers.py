"""Where KV of prompts was found, and what is in host memory and on disk, for /metrics and the status."""

from collections import Counter
from collections.abc import Iterable, Iterator

from afserve.control.wire.view_values import NodeView
from afserve.engine.stats import AttentionStats
from afserve.metrics import MetricFamily, Sample, gauge

_REASONS = ("damaged", "unreadable", "overwritten", "late", "refused")
_TOTALS = (
    ("kv_restores", "Requests whose beginning was read from host memory or the disk.", "restores"),
    ("kv_restores_short", "Those of which not everything came.", "restores_short"),
    ("kv_restore_seconds", "Time that requests waited for that.", "restore_seconds"),
)
Nodes = list[tuple[str, AttentionStats]]


def tiers(nodes: Nodes) -> Iterator[MetricFamily]:
    """Hits by tier are always drawn; the rest where a node has such a tier."""
    hits = [(name, tier, tokens) for name, stats in nodes for tier, tokens in stats.hits.items()]
    yield _counter("kv_hit_tokens", "Prompt tokens whose KV was found, by where it was.", "tier", hits)
    with_host = [(name, stats) for name, stats in nodes if stats.tiers.host.capacity]
    with_disk = [(name, stats) for name, stats in nodes if stats.tiers.capacity]
    if with_host or with_disk:
        yield from _restores([one for one in nodes if one in with_host or one in with_disk])
    if with_host:
        yield from _hosts(with_host)
    if with_disk:
        yield from _disks(with_disk)


def hits(nodes: Iterable[NodeView]) -> dict[str, int]:
    """Prompt tokens whose KV was found, by tier, of all attention nodes; empty without any."""
    found: Counter[str] = Counter()
    for node in nodes:
        if isinstance(node.stats, AttentionStats):
            found.update(node.stats.hits)
    return dict(found)


def _restores(nodes: Nodes) -> Iterator[MetricFamily]:
    for name, help, field in _TOTALS:
        samples = tuple(Sample(getattr(s.tiers, field), (("node", node),), "_total") for node, s in nodes)
        yield MetricFamily((f"afserve_{name}",), "counter", help, samples)


def _hosts(nodes: Nodes) -> Iterator[MetricFamily]:
    hosts = [(name, stats.tiers.host) for name, stats in nodes]
    moved = [
        (name, way, value)
        for name, host in hosts
        for way, value in (("read", host.bytes_read), ("written", host.bytes_written))
    ]
    yield _counter("kv_host_bytes", "Bytes of KV blocks copied from host memory, or to it.", "way", moved)
    dropped = [(name, why, getattr(host, why)) for name, host in hosts for why in ("left", "damaged")]
    yield _counter(
        "kv_host_dropped_blocks", "Blocks that host memory does not have any more.", "reason", dropped
    )
    for name, help, field in (
        ("kv_host_blocks", "Blocks in host memory.", "blocks"),
        ("kv_host_capacity_blocks", "Blocks that may be there at most.", "capacity"),
    ):
        values = [((("node", node),), getattr(host, field)) for node, host in hosts]
        yield gauge((f"afserve_{name}",), help, values)


def _disks(nodes: Nodes) -> Iterator[MetricFamily]:
    moved = [
        (name, way, value)
        for name, stats in nodes
        for way, value in (("read", stats.tiers.bytes_read), ("written", stats.tiers.bytes_written))
    ]
    yield _counter("kv_disk_bytes", "Bytes of KV blocks read from the disk, or written.", "way", moved)
    dropped = [(name, why, getattr(stats.tiers, why)) for name, stats in nodes for why in _REASONS]
    yield _counter(
        "kv_disk_dropped_blocks", "Blocks that the disk does not have, or no more.", "reason", dropped
    )
    for name, help, field in (
        ("kv_disk_blocks", "Blocks on the disk.", "blocks"),
        ("kv_disk_capacity_blocks", "Blocks that may be there at most.", "capacity"),
    ):
        values = [((("node", node),), getattr(s.tiers, field)) for node, s in nodes]
        yield gauge((f"afserve_{name}",), help, values)


def _counter(name: str, help: str, label: str, found: list[tuple[str, str, int]]) -> MetricFamily:
    samples = tuple(Sample(value, (("node", node), (label, of)), "_total") for node, of, value in found)
    return MetricFamily((f"afserve_{name}",), "counter", help, samples)
