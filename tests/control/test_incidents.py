"""What people are told of losses: who, why, what was done and how long work stood still."""

from afserve.control.incidents import KEPT, Incidents
from afserve.control.membership.events import Cause, Happening, Incident
from afserve.control.membership.shortage import Coverage
from afserve.control.moves import Moves
from afserve.control.requests import Request
from afserve.control.wire.view_values import ClusterView, IncidentView, NodeView
from afserve.control.wire.views import decode_view, encode_view
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.stats import AttentionStats
from afserve.member import Life, attention_life, attention_node, expert_node
from afserve.placement.placement import LayerPlacement, Placement
from afserve.placement.recovery import homeless

ALONE = Placement.contiguous(layers=2, experts=4, nodes=2, slots_per_node=2)
EVERYWHERE = LayerPlacement(slots=((0, 1, 2, 3),) * 2, share=((0.5,) * 4,) * 2)
TWICE = Placement(epoch=0, nodes=2, experts=4, layers=(EVERYWHERE,) * 2)
ONE, OTHER = Life(attention_node(0), 0), Life(attention_node(1), 0)


def lost(node=None, cause=Cause.ENDED):
    return Incident(Happening.LOST, node or expert_node(1), "why", generation=3, cause=cause, did="done")


def test_losses_are_counted_by_role_and_cause_and_the_last_are_kept():
    incidents = Incidents()
    for number in range(KEPT + 5):
        incidents.note_incident(lost(cause=Cause.SLOW), float(number))
    incidents.note_incident(lost(attention_node(0)), 99.0)
    incidents.note_incident(Incident(Happening.RELOADED, expert_node(0), "2 experts", 0.5, bytes=77), 100.0)
    assert len(incidents.last) == KEPT and incidents.last[-1].at == 100.0
    assert incidents.lost_nodes() == {"attention": {"ended": 1}, "expert": {"slow": KEPT + 5}}
    assert incidents.reloaded_bytes == 77
    assert str(incidents.last[-1]) == "expert-0 loaded experts after 500 ms: 2 experts"


def test_waits_belong_to_the_expert_node_that_was_lost_last():
    incidents = Incidents()
    incidents.note_incident(lost(), 1.0)
    incidents.note_incident(lost(attention_node(1)), 2.0)
    incidents.count_stalls(
        ONE, AttentionStats(resent_rows=6, stalled=2, unnoticed_seconds=0.2, resend_seconds=0.1)
    )
    incidents.count_stalls(
        ONE, AttentionStats(resent_rows=6, stalled=2, unnoticed_seconds=0.2, resend_seconds=0.1)
    )
    incidents.count_stalls(OTHER, AttentionStats(resent_rows=1, stalled=1, homeless_seconds=0.1))
    assert [round(each.stall, 6) for each in incidents.last] == [0.15, 0.0]
    assert str(incidents.last[0]) == "expert-1 lost (ended): why; done; its rows waited 150 ms"
    assert incidents.resent_rows == 7
    assert incidents.stalled == {"unnoticed": 0.2, "resend": 0.1, "homeless": 0.1}


def test_another_life_of_an_attention_node_counts_from_zero():
    incidents = Incidents()
    incidents.count_stalls(ONE, AttentionStats(resent_rows=6))
    incidents.count_stalls(Life(ONE.node, 1), AttentionStats(resent_rows=2))
    assert incidents.resent_rows == 8


def test_experts_without_a_node_are_told_until_they_have_one():
    both, one = frozenset({0, 1}), frozenset({0})
    assert [len(homeless(*held)) for held in ((ALONE, both), (ALONE, one), (TWICE, one))] == [0, 4, 0]
    coverage = Coverage()
    member = Life(expert_node(1), 2)
    assert coverage.explain_loss(member, TWICE, one, 1.0) == "its rows go to replicas"
    assert coverage.check_covered(TWICE, one, 1.1) == []
    assert coverage.explain_loss(member, ALONE, one, 2.0).startswith("4 experts")
    assert coverage.check_covered(ALONE, one, 2.1) == []
    (found,) = coverage.check_covered(TWICE.with_epoch(1), one, 2.5)
    assert (found.what, found.who, found.generation) == (Happening.COVERED, member.node, 2)
    assert round(found.seconds, 6) == 0.5
    assert coverage.check_covered(ALONE, one, 2.6) == []


def test_a_moved_request_waits_until_its_next_token():
    moves, life = Moves(), attention_life(1, 2)
    one, other = (Request(GenerationRequest(n, (1,), SamplingParams())) for n in (1, 2))
    moves.moved(one, life, "lost", 1.0)
    moves.moved(other, life, "lost", 1.0)
    moves.moved(one, attention_life(0, 0), "stream", 1.2)
    moves.closed(other)
    moves.came(one, 1.5)
    moves.came(one, 9.0)
    assert moves.counts == {"lost": 2, "stream": 1} and moves.seconds == {"lost": 0.5}
    assert moves.stall_of("attention-1", 2) == 0.5 and moves.stall_of("attention-1", 3) == 0.0
    assert not moves.moving


def test_all_of_it_reaches_gateways_elsewhere():
    view = ClusterView(
        3,
        (NodeView("expert-0", "expert", "ready", 5, 0.5, 6, None),),
        incidents=(IncidentView(5.0, "lost", "expert-1", "expert", 3, "ended", "why", "did", 0.5, 0.25),),
        lost={"expert": {"ended": 4, "slow": 1}},
        reloaded_bytes=1 << 40,
        resent_rows=9,
        stalled={"resend": 0.5},
        wanted={"expert": 2},
    )
    assert decode_view(encode_view(view)) == view
