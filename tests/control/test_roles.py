"""Nodes that another role follows: the old process ends before the new one starts, and who cannot go is refused."""

import pytest

from afserve.control.membership.events import ChangeRole, DrainNode, Exited, Left, Replan, Start, Tell, Ticked
from afserve.control.membership.renewals import GOING_SECONDS
from afserve.control.wire.values import Drain, Drained, Shutdown
from afserve.errors import ConfigError
from afserve.member import Role, attention_node, expert_node
from tests.control.test_membership import say
from tests.control.test_scaling import moved, served


def starts(effects):
    return [effect for effect in effects if isinstance(effect, Start)]


def told(effects, value):
    return [effect.member.node for effect in effects if isinstance(effect, Tell) and effect.value == value]


def test_an_expert_node_becomes_an_attention_node_once_its_experts_have_moved():
    membership, members = served(attention=1, experts=2, most_attention=2)
    node, follower = expert_node(1), attention_node(1)
    effects = membership.on(ChangeRole(node, Role.ATTENTION), 1.0)
    assert [e for e in effects if isinstance(e, Replan)] == [Replan(frozenset({0}))] and not starts(effects)
    assert membership.state.staying() == [attention_node(0), follower, expert_node(0)]
    effects = moved(membership, members, {0})
    assert told(effects, Shutdown()) == [node] and not starts(effects), "its process is still there"
    assert starts(membership.on(Left(members[node], "ended"), 2.0)) == []
    assert starts(membership.on(Exited(node, "exit 0"), 2.1)) == [Start(follower, instead=node)]
    assert starts(membership.on(Ticked(), 20.0)) == []


def test_an_attention_node_becomes_an_expert_node_once_it_has_no_request():
    membership, members = served(attention=2, experts=2)
    node = attention_node(1)
    assert told(membership.on(ChangeRole(node, Role.EXPERT), 1.0), Drain()) == [node]
    effects = say(membership, members[node], Drained())
    assert told(effects, Shutdown()) == [node]
    began = Start(expert_node(2), instead=node)
    assert starts(membership.on(Ticked(), GOING_SECONDS - 0.1)) == []
    assert began in membership.on(Ticked(), GOING_SECONDS), "one that does not go is not waited for"


def test_one_that_dies_on_its_way_is_followed_all_the_same():
    membership, members = served(attention=2, experts=2)
    node = attention_node(1)
    membership.on(ChangeRole(node, Role.EXPERT), 1.0)
    membership.on(Exited(node, "killed"), 1.1)
    assert starts(membership.on(Left(members[node], "ended"), 1.2)) == [Start(expert_node(2), instead=node)]


def test_nobody_starts_for_a_place_that_is_not_wanted_any_more():
    membership, members = served(attention=2, experts=2)
    node = attention_node(1)
    membership.on(ChangeRole(node, Role.EXPERT), 1.0)
    membership.on(DrainNode(expert_node(2)), 1.1)
    say(membership, members[node], Drained())
    assert starts(membership.on(Exited(node, "exit 0"), 1.2)) == []
    assert membership.state.staying() == [attention_node(0), expert_node(0), expert_node(1)]


@pytest.mark.parametrize(
    ("node", "role", "said"),
    [
        (attention_node(0), Role.EXPERT, "at least one attention node"),
        (expert_node(0), Role.EXPERT, "an expert node already"),
        (expert_node(7), Role.ATTENTION, "no node of this run"),
        (expert_node(0), Role.GATEWAY, "only attention and expert nodes"),
    ],
)
def test_a_role_that_cannot_be_is_refused_and_nothing_changes(node, role, said):
    membership, _ = served(attention=1, experts=2)
    before = membership.state.staying(), membership.deployment
    with pytest.raises(ConfigError, match=said):
        membership.on(ChangeRole(node, role), 1.0)
    assert (membership.state.staying(), membership.deployment) == before


def test_a_node_whose_work_nobody_else_can_do_now_is_refused():
    membership, members = served(attention=2, experts=3)
    membership.on(Left(members[attention_node(0)], "killed"), 1.0)
    with pytest.raises(ConfigError, match="no other attention node serves"):
        membership.on(ChangeRole(attention_node(1), Role.EXPERT), 1.1)
    for index in (0, 1):
        membership.on(Left(members[expert_node(index)], "killed"), 1.2)
    with pytest.raises(ConfigError, match="cannot become an attention node"):
        membership.on(ChangeRole(expert_node(2), Role.ATTENTION), 1.3)
