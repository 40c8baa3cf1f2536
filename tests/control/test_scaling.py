"""Nodes that go by name and nodes that get new processes: what is told to whom, and in which order."""

import pytest

from afserve.control.membership.events import (
    ChangePhase,
    ChangeRole,
    Dismiss,
    DrainAll,
    DrainNode,
    EndRun,
    Exited,
    Left,
    Place,
    Replan,
    RestartNodes,
    Scale,
    Start,
    Tell,
    Ticked,
)
from afserve.control.membership.recovery import OnLoss
from afserve.control.wire.change_values import count_of
from afserve.control.wire.placement_values import Adopted, Filled, FillSlots
from afserve.control.wire.values import Drain, Drained, Endpoint, Peers, Ready, Shutdown
from afserve.errors import ConfigError
from afserve.member import AttentionPhase, Life, NodeId, Role, attention_node, expert_node
from afserve.placement.placement import FREE, LayerPlacement, Placement
from tests.control.test_membership import join, run_of, say


def served(attention=1, experts=2, **rules):
    """A run whose nodes all serve: (membership, members by node)."""
    membership = run_of(attention, experts, **rules)
    members = {node: join(membership, node) for node in membership.deployment.nodes}
    for node, member in members.items():
        say(membership, member, Endpoint("a" if node.role is Role.EXPERT else "", {}), Ready(1))
    assert membership.settled
    return membership, members


def moved(membership, members, holders):
    """All experts are on `holders` from now on, as everyone has said; what comes of the last word."""
    rows = tuple((*range(4), FREE) if n in holders else (FREE,) * 5 for n in range(max(holders) + 1))
    share = tuple(tuple(0.0 if e == FREE else 1 / len(holders) for e in row) for row in rows)
    target = Placement(0, len(rows), 4, (LayerPlacement(rows, share),))
    effects = membership.on(Place(target, frozenset(holders)), 1.0)
    while fills := [
        (e.member, e.value) for e in effects if isinstance(e, Tell) and isinstance(e.value, FillSlots)
    ]:
        epoch = fills[0][1].placement.epoch
        for member, _ in fills:
            say(membership, member, Filled(epoch))
        effects = say(membership, members[attention_node(0)], Adopted(epoch))
    return effects


def test_a_node_that_is_drained_by_name_leaves_its_place_and_its_exit_is_no_loss():
    membership, members = served(attention=2)
    first = members[attention_node(0)]
    assert membership.on(DrainNode(attention_node(0)), 1.0) == [Tell(first, Drain())]
    assert membership.deployment.count(Role.ATTENTION) == 1
    assert say(membership, first, Drained()) == [Tell(first, Shutdown())]
    assert membership.on(Left(first, "ended"), 2.0) == membership.on(Exited(first.node, "exit 0"), 2.0) == []
    assert membership.members.places(Role.ATTENTION) == (attention_node(1),) and not membership.ended
    assert membership.on(Scale(Role.EXPERT, 3), 3.0) == [Start(expert_node(2))], "nodes come as before"


def test_whoever_leaves_already_is_told_when_the_run_ends():
    """A gateway that only leaves answers on every open connection once more; at the end of the run it refuses."""
    membership, members = served(attention=2)
    first, second = (members[attention_node(i)] for i in range(2))
    membership.on(DrainNode(first.node), 1.0)
    ending = Drain(ends=True)
    assert membership.on(DrainAll(), 2.0) == [Tell(first, ending), Tell(second, ending)]
    assert membership.on(Ticked(), 2.1) == [], "once"


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (attention_node(0), "at least one attention node"),
        (NodeId(Role.GATEWAY, 0), "no node of this run"),
        (expert_node(7), "no node of this run"),
    ],
)
def test_a_node_that_cannot_go_is_refused(node, said):
    membership, _ = served()
    with pytest.raises(ConfigError, match=said):
        membership.on(DrainNode(node), 1.0)
    assert membership.deployment.counts == {Role.ATTENTION: 1, Role.EXPERT: 2}


def test_there_are_never_more_attention_nodes_than_mailboxes():
    membership, _ = served()
    with pytest.raises(ConfigError, match="mailboxes for 1; start with --most-attention"):
        membership.on(Scale(Role.ATTENTION, 2), 1.0)


def test_an_attention_node_gets_a_new_process_once_its_requests_have_ended():
    membership, members = served(attention=2)
    node = attention_node(1)
    assert membership.on(RestartNodes((node,)), 1.0) == [Tell(members[node], Drain())]
    with pytest.raises(ConfigError, match="being restarted"):
        membership.on(Scale(Role.ATTENTION, 1), 1.0)
    assert say(membership, members[node], Drained()) == [Tell(members[node], Shutdown())]
    assert membership.on(Left(members[node], "ended"), 2.0) == []
    assert membership.on(Ticked(), 2.5) == [], "its process may still be writing"
    membership.on(Exited(node, "exit 0"), 2.6)
    successor = join(membership, node)
    assert successor.generation == 1 and membership.state.renewals.planned
    say(membership, successor, Endpoint("", {}), Ready(1))
    assert membership.state.renewals.planned, "gateways are about to hear of it"
    assert membership.on(RestartNodes((node,)), 2.7) == [Tell(successor, Drain())], (
        "asked again, it has its turn again"
    )


def test_once_the_last_one_serves_again_other_changes_may_follow():
    """Whoever waits for a restart sees that all serve, and asks for the next change at once."""
    membership, members = served(attention=2)
    first, second = attention_node(0), attention_node(1)
    membership.on(RestartNodes((first, second)), 1.0)

    def goes_and_comes(node):
        say(membership, members[node], Drained())
        membership.on(Exited(node, "exit 0"), 2.0)
        membership.on(Left(members[node], "ended"), 2.0)
        members[node] = join(membership, node)
        say(membership, members[node], Endpoint("", {}), Ready(1))

    goes_and_comes(first)
    with pytest.raises(ConfigError, match="being restarted"):
        membership.on(Scale(Role.ATTENTION, 1), 2.0)  # the second one's turn is to come
    membership.on(Ticked(), 3.0)
    goes_and_comes(second)
    assert membership.state.renewals.planned, "gateways are about to hear of it"
    effects = membership.on(Scale(Role.ATTENTION, 1), 3.0)
    assert Tell(members[second], Drain()) in effects and membership.deployment.count(Role.ATTENTION) == 1
    say(membership, members[second], Drained())
    membership.on(Left(members[second], "ended"), 3.1)
    membership.on(Ticked(), 4.0)
    assert not membership.state.renewals.planned and not membership.ended
    assert list(membership.members.places(Role.ATTENTION)) == [first]


def test_the_turn_of_a_node_that_serves_again_ends():
    membership, members = served(attention=2)
    node = attention_node(1)
    membership.on(RestartNodes((node, node)), 1.0)
    membership.on(RestartNodes((node,)), 1.0)
    say(membership, members[node], Drained())
    membership.on(Exited(node, "exit 0"), 2.0)
    assert membership.on(Left(members[node], "ended"), 2.0) == [Start(node)]
    successor = join(membership, node)
    say(membership, successor, Endpoint("", {}), Ready(1))
    assert (
        membership.on(Ticked(), 3.0) == [] and not membership.state.renewals.planned and not membership.ended
    )


def test_the_turn_of_a_place_that_somebody_else_takes_ends_too():
    membership, members = served(attention=2)
    node = attention_node(0)
    membership.on(RestartNodes((node,)), 1.0)
    say(membership, members[node], Drained())
    membership.on(Left(members[node], "ended"), 1.0)
    members[node] = join(membership, node)  # nobody has been started for it yet
    say(membership, members[node], Endpoint("", {}), Ready(1))
    membership.on(Ticked(), 2.0)
    assert not membership.state.renewals.planned


def test_each_starts_when_the_one_before_it_serves():
    membership, members = served(attention=2)
    effects = membership.on(RestartNodes((attention_node(0), attention_node(1))), 1.0)
    assert effects == [Tell(members[attention_node(0)], Drain())]
    say(membership, members[attention_node(0)], Drained())
    membership.on(Exited(attention_node(0), "exit 0"), 2.0)
    assert membership.on(Left(members[attention_node(0)], "ended"), 2.0) == [Start(attention_node(0))]
    successor = join(membership, attention_node(0))
    say(membership, successor, Endpoint("", {}), Ready(1))
    assert membership.on(Ticked(), 3.0) == [Tell(members[attention_node(1)], Drain())]


def test_an_expert_node_goes_when_the_others_hold_its_experts():
    membership, members = served()
    node = expert_node(1)
    assert membership.on(RestartNodes((node,)), 1.0) == [Replan(frozenset({0}))]
    effects = moved(membership, members, {0})
    assert Tell(members[node], Shutdown()) in effects
    membership.on(Left(members[node], "ended"), 2.0)
    assert Start(node) in membership.on(Exited(node, "exit 0"), 2.0)
    successor = join(membership, node)
    effects = say(membership, successor, Endpoint("b", {}), Ready(1))
    assert Replan(frozenset({0, 1})) in effects
    assert any(isinstance(e.value, Peers) for e in effects if isinstance(e, Tell))


def test_an_expert_node_whose_experts_have_no_other_room():
    membership, _ = served(experts=1)
    with pytest.raises(ConfigError, match="no room for the experts of expert-0"):
        membership.on(RestartNodes((expert_node(0),)), 1.0)
    membership, members = served(experts=1, on_loss=OnLoss.RECOVER)
    assert "requests wait" in membership.wishes.waits_for(expert_node(0))
    effects = membership.on(RestartNodes((expert_node(0),)), 1.0)
    assert effects == [Tell(members[expert_node(0)], Shutdown())]


def test_who_does_not_go_is_dismissed_and_its_place_given_to_another():
    membership, members = served(attention=2)
    node = attention_node(0)
    membership.on(RestartNodes((node,)), 1.0)
    say(membership, members[node], Drained())
    for member in members.values():
        membership.on(Ticked(), 3.0)
        assert membership.members.find_life(member)
    effects = membership.on(Ticked(), 6.0)
    assert [type(e) for e in effects] == [Dismiss] and "did not go" in effects[0].error.message
    assert membership.on(Ticked(), 8.5) == [Start(node)] and not any(isinstance(e, EndRun) for e in effects)


@pytest.mark.parametrize(("wanted", "count"), [("3", 3), ("+1", 3), ("-1", 1), ("+0", 2), ("-5", -3)])
def test_numbers_of_nodes(wanted, count):
    assert count_of("experts", 2, wanted) == count


@pytest.mark.parametrize("wanted", ["", "+", "x", "1.5", "--1", "+-1", "1" * 20, "²", " 1"])
def test_what_is_no_number_of_nodes_is_refused(wanted):
    with pytest.raises(ConfigError, match="experts: "):
        count_of("experts", 2, wanted)


# ---- phases


def phased(prefill=1, decode=2):
    """A run whose attention nodes have phases, all of which serve."""
    membership = run_of(prefill + decode, 1, most_attention=8)
    for index in range(prefill + decode):
        phase = AttentionPhase.PREFILL if index < prefill else AttentionPhase.DECODE
        membership.state.desired = membership.state.desired.in_phase(index, phase)
    for node in membership.deployment.nodes:
        say(membership, join(membership, node), Endpoint("a", {}), Ready(1))
    assert membership.settled
    return membership


def phases_of(membership):
    return {peer.life.index: str(peer.phase) for peer in membership.attention_nodes().nodes}


def test_a_pool_of_a_phase_scales_alone():
    membership = phased()
    assert phases_of(membership) == {0: "prefill", 1: "decode", 2: "decode"}
    assert membership.on(Scale(Role.ATTENTION, 2, AttentionPhase.PREFILL), 1.0) == [Start(attention_node(3))]
    assert membership.deployment.phase(3) is AttentionPhase.PREFILL
    assert membership.deployment.count(Role.ATTENTION) == 4
    membership.on(Scale(Role.ATTENTION, 1, AttentionPhase.DECODE), 2.0)
    assert membership.wishes.nodes_in_phase(AttentionPhase.DECODE) == [attention_node(1)]
    assert membership.deployment.count(Role.ATTENTION) == 3


def test_a_place_that_is_taken_anew_has_the_phase_that_was_asked_for():
    membership = phased()
    assert membership.on(Scale(Role.ATTENTION, 0, AttentionPhase.PREFILL), 1.0)
    say(membership, Life(attention_node(0), 0), Drained())
    membership.on(Scale(Role.ATTENTION, 1, AttentionPhase.BOTH), 2.0)
    assert membership.deployment.phases == {1: "decode", 2: "decode"}


def test_a_node_changes_its_phase_while_it_serves():
    membership = phased()
    membership.on(ChangePhase(attention_node(2), AttentionPhase.PREFILL), 1.0)
    assert phases_of(membership) == {0: "prefill", 1: "decode", 2: "prefill"}
    membership.on(ChangePhase(attention_node(0), AttentionPhase.BOTH), 1.0)
    assert phases_of(membership) == {0: "both", 1: "decode", 2: "prefill"}
    for node, said in ((attention_node(1), "no decode node"), (expert_node(0), "no attention node")):
        with pytest.raises(ConfigError, match=said):
            membership.on(ChangePhase(node, AttentionPhase.PREFILL), 1.0)
    for event in (DrainNode(attention_node(1)), ChangeRole(attention_node(1), Role.EXPERT)):
        with pytest.raises(ConfigError, match="no decode node"):
            membership.on(event, 1.0)


def test_pools_that_change_together_are_looked_at_together():
    membership, _ = served(attention=1, most_attention=3)
    one_each = [Scale(Role.ATTENTION, 1, phase) for phase in (AttentionPhase.PREFILL, AttentionPhase.DECODE)]
    membership.wishes.check_scales(one_each)
    with pytest.raises(ConfigError, match="no decode node"):
        membership.wishes.check_scales(one_each[:1])
    with pytest.raises(ConfigError, match="mailboxes for 3"):
        membership.wishes.check_scales([*one_each, Scale(Role.ATTENTION, 2, AttentionPhase.BOTH)])
    with pytest.raises(ConfigError, match="-1 prefill nodes"):
        membership.wishes.check_scales([Scale(Role.ATTENTION, -1, AttentionPhase.PREFILL)])
