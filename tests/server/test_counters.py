"""A counter is declared once: a field of a group is on the wire, in /status and in /metrics without a further line."""

from dataclasses import dataclass, replace

import pytest

from afserve import errors
from afserve.control.wire import control_pb2 as pb
from afserve.control.wire.messages import decode_from_node, encode_from_node
from afserve.control.wire.values import Heartbeat
from afserve.control.wire.view_values import ClusterView, NodeView
from afserve.control.wire.views import decode_view, encode_view
from afserve.counters import Over, counter, counters_of, digest_of, group_of, values_of
from afserve.engine.stats import KINDS, AttentionStats, ExpertStats
from afserve.server.metrics.observe import ServerMetrics


@dataclass(frozen=True, slots=True)
class Doubt:
    guesses: int = counter(0, "Guesses.")
    hesitated: float = counter(0.0, "Time spent.", "doubt_seconds", where="guesses")


@dataclass(frozen=True, slots=True)
class MoreStats(ExpertStats):
    yawns: int = counter(0, "Yawns.", "expert_node_yawns")
    naps: int = counter(0, "Naps.", "naps", over=Over.MODEL)
    doubt: Doubt = Doubt()


@pytest.fixture
def one_more(monkeypatch):
    monkeypatch.setitem(KINDS, "expert", MoreStats)
    return MoreStats(rows=7, busy_seconds=0.25, yawns=3, naps=2, doubt=Doubt(5, 1.5))


def as_node(stats, index=0):
    return NodeView(f"expert-{index}", "expert", "ready", 1, 0.0, 0, stats)


def test_a_new_counter_is_seen_everywhere(one_more, http, server):
    heard = decode_from_node(encode_from_node(Heartbeat(9, one_more)))
    assert heard == Heartbeat(9, one_more), "from the node to the controller"
    shown = decode_view(encode_view(ClusterView(0, (as_node(heard.stats), as_node(MoreStats(naps=4), 1)))))
    server.backend.nodes = shown.nodes
    stats = http.get("/status").json()["nodes"][0]["stats"]
    assert stats["yawns"] == 3 and stats["doubt"] == {"guesses": 5, "hesitated": 1.5} and stats["rows"] == 7
    text = http.get("/metrics").text
    assert (
        "# HELP afserve_expert_node_yawns_total Yawns.\n# TYPE afserve_expert_node_yawns_total counter"
        in text
    )
    assert 'afserve_expert_node_yawns_total{model_name="tiny",node="expert-0"} 3\n' in text
    assert 'afserve_naps_total{model_name="tiny"} 6\n' in text
    assert 'vllm:naps_total{model_name="tiny",engine="0"} 6\n' in text, "as all sums over nodes"
    assert 'afserve_doubt_seconds_total{model_name="tiny",node="expert-0"} 1.5\n' in text
    assert 'afserve_doubt_seconds_total{model_name="tiny",node="expert-1"}' not in text, "it has none"


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_counter_travels_by_itself(kind):
    """Each with a value of its own, so that none stands in another's place."""
    whole = [n for n, one in enumerate(counters_of(kind), 1) if one.kind is int]
    real = [n + 0.5 for n, one in enumerate(counters_of(kind), 1) if one.kind is float]
    stats = group_of(kind, whole, real)
    assert values_of(stats) == (whole, real)
    assert decode_from_node(encode_from_node(Heartbeat(0, stats))).stats == stats
    assert [one.read(stats) for one in counters_of(kind)] == [
        n + (one.kind is float) / 2 for n, one in enumerate(counters_of(kind), 1)
    ]


def test_who_counts_otherwise_is_refused(one_more):
    data = encode_from_node(Heartbeat(0, one_more))
    KINDS["expert"] = ExpertStats
    with pytest.raises(errors.ProtocolError, match="ExpertStats are declared otherwise there; are versions"):
        decode_from_node(data)
    short = pb.Counts(declared=digest_of(ExpertStats), whole=[1, 2], real=[0.5])
    long = pb.Counts(declared=digest_of(ExpertStats), whole=[1] * 99, real=[0.5] * 99)
    for counts, said in ((short, "fewer counters than"), (long, "more counters than")):
        wire = pb.FromNode(heartbeat=pb.Heartbeat(expert=counts))
        with pytest.raises(errors.ProtocolError, match=said):
            decode_from_node(wire.SerializeToString())
        view = pb.ClusterView(nodes=[pb.NodeView(expert=counts)])
        with pytest.raises(errors.ProtocolError, match=said):
            decode_view(view.SerializeToString())


def test_digests_differ_where_declarations_do():
    assert len({digest_of(kind) for kind in (AttentionStats, ExpertStats, MoreStats, Doubt)}) == 4


def test_all_that_is_declared_says_what_it_is():
    declared = {one for kind in KINDS.values() for one in counters_of(kind)}  # a group of both kinds once
    assert all(one.help.endswith(".") for one in declared)
    names = [metric.name for one in declared for metric in one.metrics if not metric.labels]
    assert len(names) == len(set(names)), "two families of one name"
    text = "\n".join(
        f.names[0]
        for f in ServerMetrics().families(ClusterView(0, (as_node(replace(ExpertStats(), rows=1)),)))
    )
    assert all(
        f"afserve_{name}" in text
        for name in names
        if not name.startswith(("kv_disk", "kv_host", "kv_rest", "expert_memory"))
    )
