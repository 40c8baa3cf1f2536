"""Not enough is left: new requests are refused with the reason, and taken again when it is there."""

from itertools import pairwise

import pytest

from afserve.control.membership.events import (
    Exited,
    Happening,
    Incident,
    Left,
    RestartNodes,
    Scale,
    Start,
    Ticked,
)
from afserve.control.membership.recovery import OnLoss
from afserve.control.membership.shortage import lacking
from afserve.control.wire.values import Endpoint, Ready
from afserve.member import Role, attention_node, expert_node
from afserve.placement.placement import Placement
from tests.control.test_membership import join, say
from tests.control.test_scaling import moved, served

RECOVER = OnLoss.RECOVER
AGES = 1e6  # seconds: nobody here says anything twice


def refusing(membership, now):
    membership.on(Ticked(), now)
    return membership.attention_nodes().refusing


def back(membership, node):
    say(membership, join(membership, node), Endpoint("a" if node.role is Role.EXPERT else "", {}), Ready(1))


STARTED_OR_NOT = pytest.mark.parametrize(
    ("restarts", "seconds"), [(5, 30.0), (0, 2.0)], ids=["started anew", "keeps failing"]
)


@STARTED_OR_NOT
def test_experts_that_nobody_holds_or_has_room_for_are_named(restarts, seconds):
    membership, members = served(attention=1, experts=1, on_loss=RECOVER, patience=AGES, restarts=restarts)
    membership.on(Left(members[expert_node(0)], "killed"), 100.0)
    assert refusing(membership, 99.9 + seconds) == ""
    why = refusing(membership, 100.1 + seconds)
    assert why == (
        "expert 0 of MoE layer 0 (and 3 more) stood only on expert-0 (its process ended), "
        "and the other expert nodes have no room for that"
    )
    assert refusing(membership, 140.0) == why, "the text does not change while nothing does"
    back(membership, expert_node(0))
    assert refusing(membership, 140.1) == ""


def test_experts_that_are_being_loaded_elsewhere_are_waited_for_as_long_as_by_running_requests():
    membership, members = served(attention=1, experts=2, on_loss=RECOVER, patience=AGES)
    membership.on(Left(members[expert_node(1)], "killed"), 100.0)
    assert refusing(membership, 129.9) == ""
    assert "expert 2 of MoE layer 0 (and 1 more) stood only on expert-1" in refusing(membership, 130.1)


@STARTED_OR_NOT
def test_without_attention_nodes_nothing_new_is_taken(restarts, seconds):
    membership, members = served(attention=1, experts=1, on_loss=RECOVER, patience=AGES, restarts=restarts)
    membership.on(Left(members[attention_node(0)], "killed"), 100.0)
    assert refusing(membership, 99.9 + seconds) == ""
    assert (
        refusing(membership, 100.1 + seconds) == "no attention node serves (attention-0: its process ended)"
    )
    back(membership, attention_node(0))
    assert refusing(membership, 101.0 + seconds) == ""


def test_by_the_other_rule_nothing_is_refused():
    membership, members = served(attention=1, experts=1, on_loss=OnLoss.END)
    membership.on(Left(members[expert_node(0)], "killed"), 100.0)
    assert refusing(membership, 101.9) == "" and membership.on(Ticked(), 103.0) == []


def failing(membership, node, until, incidents=None):
    """Every process that is started for this place ends at once, until then; when they were started."""
    now, started = 100.0, []
    while now < until:
        now += 0.25
        effects = membership.on(Ticked(), now)
        if Start(node) in effects:
            started.append(now)
            effects += membership.on(Exited(node, "exit 9"), now)
        if incidents is not None:
            incidents += [e for e in effects if isinstance(e, Incident)]
    return started


@pytest.mark.slow
def test_a_place_is_tried_for_ever_later_each_time_and_at_most_some_minutes_apart():
    membership, members = served(attention=1, experts=2, on_loss=RECOVER, patience=AGES, restarts=2)
    node = expert_node(1)
    incidents: list[Incident] = []
    membership.on(Left(members[node], "killed"), 100.0)
    membership.on(Exited(node, "exit 9"), 100.0)
    started = failing(membership, node, 4000.0, incidents)
    waits = [after - before for before, after in pairwise(started)]
    assert waits == sorted(waits) and 100.0 < waits[-1] <= 121.0 and len(started) > 30
    assert {i.what for i in incidents} == {Happening.FAILING} and "afserve restart expert-1" in incidents[
        0
    ].did
    assert not membership.ended
    assert membership.losses.absent() == ["expert-1 is gone: killed; it keeps failing, and is tried again"]
    back(membership, node)
    assert membership.losses.absent() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [RestartNodes((expert_node(1),)), Scale(Role.EXPERT, 2)], ids=["restart", "scale"]
)
def test_who_asks_for_a_place_that_waits_has_it_tried_at_once(asked):
    membership, members = served(attention=1, experts=2, on_loss=RECOVER, patience=AGES, restarts=2)
    node = expert_node(1)
    membership.on(Left(members[node], "killed"), 100.0)
    started = failing(membership, node, 1000.0)
    now = started[-1] + 20.0
    assert not any(isinstance(e, Start) for e in membership.on(Ticked(), now)), "it waits for minutes"
    assert Start(node) in membership.on(asked, now) + membership.on(Ticked(), now + 0.25)
    back(membership, node)
    assert membership.members.last_at(node).serving and not membership.state.renewals.planned


def test_a_restart_of_all_stops_at_one_that_does_not_come_back_and_other_changes_are_taken():
    membership, members = served(attention=1, experts=3, on_loss=RECOVER, patience=AGES, restarts=2)
    first, now = expert_node(0), 100.0
    membership.on(RestartNodes(tuple(expert_node(n) for n in range(3))), now)
    moved(membership, members, [1, 2])
    membership.on(Left(members[first], "told to"), now)
    membership.on(Exited(first, "exit 0"), now)
    failing(membership, first, 200.0)
    assert not membership.state.renewals.planned and membership.members.last_at(expert_node(1)).serving
    assert membership.on(Scale(Role.EXPERT, 4), 201.0)


@pytest.mark.parametrize(
    ("serving", "experts", "beyond"),
    [({0, 1}, 0, 0), ({0}, 2, 1), ({0, 2}, 2, 0), (set(), 4, 4)],
    ids=["all", "one without room", "a newcomer has room", "none"],
)
def test_who_is_homeless_and_who_finds_no_room(serving, experts, beyond):
    placement = Placement.contiguous(layers=1, experts=4, nodes=2, slots_per_node=3)
    found = lacking(placement, frozenset(serving), room=3)
    assert (len(found.experts), len(found.beyond)) == (experts, beyond)
