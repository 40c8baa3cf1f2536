"""Not enough is left: new requests are refused with the reason, and taken again when it is there."""

import pytest

from afserve.control.membership.events import Exited, Happening, Incident, Left, Start, Ticked
from afserve.control.membership.recovery import OnLoss
from afserve.control.membership.shortage import lacking
from afserve.control.wire.values import Endpoint, Ready
from afserve.member import Role, attention_node, expert_node
from afserve.placement.placement import Placement
from tests.control.test_membership import join, say
from tests.control.test_scaling import served

RECOVER = OnLoss.RECOVER
AGES = 1e6  # seconds: nobody here says anything twice


def refusing(membership, now):
    membership.on(Ticked(), now)
    return membership.attention_nodes().refusing


def back(membership, node):
    say(membership, join(membership, node), Endpoint("a" if node.role is Role.EXPERT else "", {}), Ready(1))


def test_experts_that_nobody_holds_or_has_room_for_are_named():
    membership, members = served(attention=1, experts=1, on_loss=RECOVER, patience=AGES)
    membership.on(Left(members[expert_node(0)], "killed"), 100.0)
    assert refusing(membership, 101.9) == ""
    why = refusing(membership, 102.1)
    assert why == (
        "expert 0 of MoE layer 0 (and 3 more) stood only on expert-0 (killed), "
        "and the other expert nodes have no room for that"
    )
    assert refusing(membership, 110.0) == why, "the text does not change while nothing does"
    back(membership, expert_node(0))
    assert refusing(membership, 110.1) == ""


def test_experts_that_are_being_loaded_elsewhere_are_waited_for_as_long_as_by_running_requests():
    membership, members = served(attention=1, experts=2, on_loss=RECOVER, patience=AGES)
    membership.on(Left(members[expert_node(1)], "killed"), 100.0)
    assert refusing(membership, 129.9) == ""
    assert "expert 2 of MoE layer 0 (and 1 more) stood only on expert-1" in refusing(membership, 130.1)


@pytest.mark.parametrize(("restarts", "seconds"), [(5, 30.0), (0, 2.0)], ids=["started anew", "given up"])
def test_without_attention_nodes_nothing_new_is_taken(restarts, seconds):
    membership, members = served(attention=1, experts=1, on_loss=RECOVER, patience=AGES, restarts=restarts)
    membership.on(Left(members[attention_node(0)], "killed"), 100.0)
    assert refusing(membership, 99.9 + seconds) == ""
    assert refusing(membership, 100.1 + seconds) == "no attention node serves (attention-0: killed)"
    back(membership, attention_node(0))
    assert refusing(membership, 101.0 + seconds) == ""


def test_by_the_other_rule_nothing_is_refused():
    membership, members = served(attention=1, experts=1, on_loss=OnLoss.END)
    membership.on(Left(members[expert_node(0)], "killed"), 100.0)
    assert refusing(membership, 101.9) == "" and membership.on(Ticked(), 103.0) == []


def test_a_place_that_was_lost_too_often_stays_empty_until_somebody_comes_by_hand():
    membership, members = served(attention=1, experts=2, on_loss=RECOVER, patience=AGES, restarts=2)
    node, now, incidents = expert_node(1), 100.0, []
    member = members[node]
    for _ in range(3):
        effects = membership.on(Left(member, "killed"), now) + membership.on(Exited(node, "exit 9"), now)
        effects += membership.on(Ticked(), now + 5.0)
        incidents += [e for e in effects if isinstance(e, Incident)]
        if Start(node) not in effects:
            break
        member = join(membership, node)
        now += 6.0
    assert [i.what for i in incidents if i.what is not Happening.LOST] == [Happening.GIVEN_UP]
    assert "`afserve node --role expert --index 1 --join HOST:PORT` fills its place" in incidents[-1].why
    assert not membership.ended and membership.absent() == ["expert-1 is gone: killed; not started again"]
    later = [e for second in range(200) for e in membership.on(Ticked(), now + second)]
    assert not any(isinstance(e, Start | Incident) and getattr(e, "node", node) == node for e in later)
    back(membership, node)
    assert membership.absent() == []


@pytest.mark.parametrize(
    ("serving", "experts", "beyond"),
    [({0, 1}, 0, 0), ({0}, 2, 1), ({0, 2}, 2, 0), (set(), 4, 4)],
    ids=["all", "one without room", "a newcomer has room", "none"],
)
def test_who_is_homeless_and_who_finds_no_room(serving, experts, beyond):
    placement = Placement.contiguous(layers=1, experts=4, nodes=2, slots_per_node=3)
    found = lacking(placement, frozenset(serving), room=3)
    assert (len(found.experts), len(found.beyond)) == (experts, beyond)
