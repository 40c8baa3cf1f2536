"""A counter is declared once: a field of a group is on the wire, in /status and in /metrics without a further line."""

from dataclasses import dataclass, fields, replace

import pytest

from afserve import errors
from afserve.cli.status import draft_lines
from afserve.control.wire import control_pb2 as pb
from afserve.control.wire.messages import decode_from_node, encode_from_node
from afserve.control.wire.values import Heartbeat
from afserve.control.wire.view_values import ClusterView, NodeView
from afserve.control.wire.views import decode_view, encode_view
from afserve.counters import Over, counter, counters_of, digest_of, group_of, values_of
from afserve.drafts import DRAFT_TOKENS
from afserve.engine.draft.counts import DraftCounts
from afserve.engine.stats import KINDS, AttentionStats, ExpertStats
from afserve.engine.stats.drafts import AcceptedByPosition
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


def test_drafts_are_counted_by_position_and_by_drafter(http, server):
    """By vLLM's names where vLLM has them; a drafter that did not draft has no line."""
    counts = DraftCounts()
    counts.verified("ngram", 4, 2)
    counts.verified("ngram", 3, 0)
    counts.verified("suffix", 1, 1)
    stats = counts.stats()
    assert (stats.verified, stats.tokens, stats.accepted) == (3, 8, 3)
    node = NodeView("attention-0", "attention", "ready", 1, 0.0, 0, AttentionStats(drafts=stats))
    server.backend.nodes = (node, replace(node, name="attention-1"))
    lines = http.get("/metrics").text.splitlines()
    for name, value in (("drafts", 6), ("draft_tokens", 16), ("accepted_tokens", 6)):
        assert f'vllm:spec_decode_num_{name}_total{{model_name="tiny",engine="0"}} {value}' in lines
    per_position = [
        line.rpartition(" ")[2]
        for line in lines
        if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total{")
    ]
    assert per_position == ["4", "2"] + ["0"] * 14
    assert (
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",engine="0",position="1"} 2'
        in lines
    )
    by_drafter = [line for line in lines if line.startswith("afserve_drafter_tokens_total{")]
    labels = 'model_name="tiny",node="attention-0",drafter'
    assert by_drafter[:2] == [
        f'afserve_drafter_tokens_total{{{labels}="ngram"}} 7',
        f'afserve_drafter_tokens_total{{{labels}="suffix"}} 1',
    ]
    assert len(by_drafter) == 4
    assert draft_lines(http.get("/status").json()) == [
        "ngram drafts: 2.00 tokens a step, 4 of 14 drafted tokens right",
        "suffix drafts: 2.00 tokens a step, 2 of 2 drafted tokens right",
    ]
    before = http.get("/status").json()
    assert draft_lines(before, before) == []


def test_every_position_of_a_draft_is_counted():
    assert len(fields(AcceptedByPosition)) == DRAFT_TOKENS.high
