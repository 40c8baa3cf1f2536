"""What /metrics says of lost nodes: how many, what was sent, loaded and moved again, and how long work waited."""

from collections import Counter
from collections.abc import Iterator

from afserve.control.wire.view_values import ClusterView
from afserve.metrics import MetricFamily, Sample, gauge

_SERVING = ("ready", "draining")


def losses(view: ClusterView) -> Iterator[MetricFamily]:
    """All counts are of the whole run, but `moved` and `refused`, which are of the gateway that is asked."""
    lost = tuple(
        Sample(count, (("role", role), ("cause", cause)), "_total")
        for role, causes in sorted(view.lost.items())
        for cause, count in sorted(causes.items())
    )
    yield MetricFamily(
        ("afserve_nodes_lost",), "counter", "Nodes lost while they served, by what it was noticed by.", lost
    )
    for name, help, total in (
        (
            "expert_bytes_reloaded",
            "Bytes of weights read because experts were placed anew.",
            view.reloaded_bytes,
        ),
        ("rows_resent", "Rows sent again because an expert node was lost.", view.resent_rows),
    ):
        yield MetricFamily((f"afserve_{name}",), "counter", help, (Sample(total, (), "_total"),))
    moved = tuple(Sample(count, (("cause", why),), "_total") for why, count in sorted(view.moved.items()))
    yield MetricFamily(
        ("afserve_requests_moved",), "counter", "Requests that went on at another attention node.", moved
    )
    refused = tuple(
        Sample(count, (("reason", why),), "_total") for why, count in sorted(view.refused.items())
    )
    yield MetricFamily(
        ("afserve_requests_refused",),
        "counter",
        "Requests refused at once because what they ask for was predicted to be missed.",
        refused,
    )
    stalled = tuple(Sample(s, (("cause", cause),), "_total") for cause, s in sorted(view.stalled.items()))
    yield MetricFamily(
        ("afserve_stall_seconds",),
        "counter",
        "Time that work stood still because of a loss, summed over dispatches (cause moved: over requests).",
        stalled,
    )
    serving = Counter(node.role for node in view.nodes if node.state in _SERVING)
    for name, help, counts in (
        ("wanted", "Nodes that there should be.", view.wanted),
        ("serving", "Nodes that serve.", {role: serving[role] for role in (*view.wanted, *serving)}),
    ):
        samples = [((("role", role),), count) for role, count in sorted(counts.items())]
        yield gauge((f"afserve_nodes_{name}",), help, samples)
