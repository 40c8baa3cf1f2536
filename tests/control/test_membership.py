"""Single rules of the membership, event by event: what `test_schedules` cannot say who it is about."""

import pytest

from afserve.config import EngineConfig, ModelSource
from afserve.control.membership.events import (
    Admit,
    Begun,
    Dismiss,
    DrainNode,
    EndRun,
    Happening,
    Incident,
    Joined,
    Known,
    Left,
    Place,
    Replan,
    Said,
    Scale,
    Settled,
    Start,
    Tell,
    Ticked,
)
from afserve.control.membership.membership import Membership
from afserve.control.membership.migration import Phase
from afserve.control.membership.placing import TRIED, UnreadableExperts
from afserve.control.membership.recovery import GATEWAY_SECONDS, OnLoss, Rules
from afserve.control.wire.desired import Deployment
from afserve.control.wire.placement_values import Adopt, Filled, FillSlots, Retire, Unfilled
from afserve.control.wire.values import (
    Drained,
    Endpoint,
    Gateways,
    Heartbeat,
    Identity,
    Ready,
    Register,
    Shutdown,
)
from afserve.engine.stats import ExpertStats
from afserve.errors import ConfigError, RendezvousError
from afserve.member import Role, attention_node, expert_node
from afserve.placement.placement import Placement
from afserve.placement.recovery import recovered


def run_of(attention=1, experts=1, most_attention=0, gateways=0, **rules):
    placement = Placement.contiguous(layers=1, experts=4, nodes=max(1, experts), slots_per_node=5)
    counts = {Role.ATTENTION: attention, Role.EXPERT: experts}
    counts |= {Role.GATEWAY: gateways} if gateways else {}
    deployment = Deployment(
        ModelSource("/m", "m"), EngineConfig(64, 9), counts, "f", placement, most_attention=most_attention
    )
    membership = Membership(deployment, "1.0", Rules(**rules))
    assert [type(effect) for effect in membership.on(Begun(), 0.0)] == [Start] * (
        attention + experts + gateways
    )
    return membership


def join(membership, node):
    register = Register(node.role, node.index, 1, "host", "1.0")
    return next(e.member for e in membership.on(Joined(id(node), register), 0.0) if isinstance(e, Admit))


def join_anywhere(membership, role):
    """It asks for no place of its own."""
    register = Register(role, None, 1, "host", "1.0")
    return next(e.member for e in membership.on(Joined(id(role), register), 0.0) if isinstance(e, Admit))


def say(membership, member, *values):
    return [effect for value in values for effect in membership.on(Said(member, value), 0.0)]


def test_whoever_was_ready_before_anybody_spoke_of_a_checkpoint_is_asked_too():
    membership = run_of()
    first, second = join(membership, attention_node(0)), join(membership, expert_node(0))
    say(membership, first, Endpoint("", {}), Ready(1))
    effects = say(membership, second, Identity({"expert weights": "aa"}), Endpoint("a", {}), Ready(1))
    assert [type(e) for e in effects[-1:]] == [EndRun] and not any(isinstance(e, Settled) for e in effects)
    assert "attention-0 is ready, but has not said" in effects[-1].error.message


def test_the_controllers_own_copy_may_be_known_last():
    membership = run_of()
    for node, address in ((attention_node(0), ""), (expert_node(0), "a")):
        effects = say(membership, join(membership, node), Endpoint(address, {}), Ready(1))
    assert Settled() in effects
    (end,) = membership.on(Known({"expert weights": "aa"}), 1.0)
    assert isinstance(end, EndRun) and "has not said what it has" in end.error.message


@pytest.mark.parametrize(
    ("on_loss", "kinds"), [(OnLoss.END, [Dismiss, EndRun]), (OnLoss.RECOVER, [Dismiss, Tell, Incident])]
)
def test_another_copy_is_sent_away_and_told_why(on_loss, kinds):
    """While serving, the rule that gives places anew goes on without it."""
    membership = run_of(on_loss=on_loss)
    things = {"tokenizer.json": "aa"}
    for node, address in ((attention_node(0), ""), (expert_node(0), "a")):
        member = join(membership, node)
        say(membership, member, Identity(things), Endpoint(address, {}), Ready(1))
    assert membership.settled
    effects = say(membership, member, Identity({"tokenizer.json": "bb"}))
    assert [type(effect) for effect in effects] == kinds
    assert isinstance(effects[0].error, RendezvousError) and "bb against aa" in effects[0].error.message


def test_counts_that_cannot_be_are_refused_and_nothing_changes():
    membership = run_of(experts=2)
    for role, count, said in (
        (Role.EXPERT, 0, "at least one expert node"),
        (Role.ATTENTION, 0, "at least one"),
    ):
        with pytest.raises(ConfigError, match=said):
            membership.on(Scale(role, count), 0.0)
    with pytest.raises(ConfigError, match="colocated run has no expert nodes"):
        run_of(experts=0).on(Scale(Role.EXPERT, 1), 0.0)
    assert membership.deployment.counts == {Role.ATTENTION: 1, Role.EXPERT: 2}


def test_a_gateway_beyond_those_that_were_asked_for_comes_and_goes():
    membership = run_of()
    first = join(membership, attention_node(0))
    say(membership, first, Endpoint("", {}), Ready(1))
    say(membership, join(membership, expert_node(0)), Endpoint("a", {}), Ready(1))
    register = Register(Role.GATEWAY, None, 1, "host", "1.0")
    guest = next(e.member for e in membership.on(Joined(7, register), 0.0) if isinstance(e, Admit))
    assert str(guest) == "gateway-1", "the controller's own is gateway-0"
    (told,) = say(membership, guest, Endpoint("host:1", {}))
    assert told == Tell(first, Gateways(((0, ""), (1, "host:1"))))
    assert membership.on(Left(guest, "killed"), 1.0) == [Tell(first, Gateways(((0, ""),)))]
    assert not membership.members.vacancies() and not membership.ended


def test_the_place_of_a_gateway_that_came_by_itself_may_be_wanted_later():
    membership = run_of(gateways=1, on_loss=OnLoss.RECOVER, backoff=0.1)
    for node in membership.deployment.nodes:
        say(membership, join(membership, node), Endpoint("a", {}), Ready(1))
    guest = join_anywhere(membership, Role.GATEWAY)
    say(membership, guest, Endpoint("host:1", {}), Ready(1))
    membership.on(DrainNode(guest.node), 0.0)
    assert Tell(guest, Shutdown()) in say(membership, guest, Drained())
    assert membership.on(Scale(Role.GATEWAY, 2), 1.0) == [Start(guest.node)]
    wanted = join(membership, guest.node)
    say(membership, wanted, Endpoint("host:2", {}), Ready(1))
    membership.on(Left(wanted, "killed"), 2.0)
    assert Start(guest.node) in membership.on(Ticked(), 2.2), "it is no guest: its place is filled again"


@pytest.mark.parametrize(("on_loss", "lost"), [(OnLoss.RECOVER, True), (OnLoss.END, False)])
def test_a_gateway_that_stands_still_is_lost_sooner_than_an_idle_node(on_loss, lost):
    membership = run_of(on_loss=on_loss)
    say(membership, join(membership, attention_node(0)), Endpoint("", {}), Ready(1))
    say(membership, join(membership, expert_node(0)), Endpoint("a", {}), Ready(1))
    gateway = join_anywhere(membership, Role.GATEWAY)
    say(membership, gateway, Endpoint("host:1", {}), Ready(1))
    assert membership.on(Ticked(), GATEWAY_SECONDS) == []
    dismissed = [e.member for e in membership.on(Ticked(), GATEWAY_SECONDS + 0.1) if isinstance(e, Dismiss)]
    assert dismissed == [gateway] * lost


def test_signs_of_life_are_not_a_reason_to_think_about_placements(monkeypatch):
    """At 200 nodes of DeepSeek-V3's shape it took 25 ms each time, and there are hundreds of them in a second."""
    membership = run_of(experts=2)
    members = [join(membership, node) for node in (attention_node(0), expert_node(0), expert_node(1))]
    for member in members:
        say(membership, member, Endpoint("a", {}), Ready(1))
    assert membership.settled
    looked = []

    def replan():
        looked.append(1)
        return []

    monkeypatch.setattr(membership._placing, "replan", replan)
    assert say(membership, members[1], *[Heartbeat(1, ExpertStats())] * 5) == [] and not looked
    membership.on(Ticked(), 1.0)
    assert looked


def serving_run(experts=3, copies=1, **rules):
    """One attention node, and expert nodes that serve: the members, and who is lost is not started by a test."""
    membership = run_of(experts=experts, on_loss=OnLoss.RECOVER, **rules)
    members = [
        join(membership, attention_node(0)),
        *(join(membership, expert_node(i)) for i in range(experts)),
    ]
    for member in members:
        say(membership, member, Endpoint("a" if member.node.role is Role.EXPERT else "", {}), Ready(1))
    assert membership.settled
    return membership, members


def placed_by(membership, effects, now=0.0):
    """What a controller makes of `Replan`: with experts that cannot be read nowhere where they could not."""
    (asked,) = [effect for effect in effects if isinstance(effect, Replan)]
    placement = membership.migration.placement
    found = recovered(placement, frozenset(range(placement.nodes)) - asked.nodes, 5, None, asked.barred)
    if not found.order:
        return asked, []
    return asked, membership.on(Place(found.placement, asked.nodes, urgent=True), now)


def fills_of(effects):
    return {
        e.member: e.value.placement for e in effects if isinstance(e, Tell) and isinstance(e.value, FillSlots)
    }


def test_experts_that_cannot_be_read_are_tried_elsewhere_then_later_and_nobody_leaves():
    membership, (front, first, second, third) = serving_run()
    asked, effects = placed_by(membership, membership.on(Left(third, "killed"), 1.0))
    said = []
    for _ in range(2):
        fills = fills_of(effects)
        (placement,) = set(fills.values())
        (node,) = [n for n in (first, second) if any(e == 3 for _, _, e in placement.held(n.node.index))]
        other = second if node is first else first
        assert not asked.barred.get((0, 3), frozenset()) & {node.node.index}
        effects = say(membership, other, Filled(placement.epoch))
        effects += say(membership, node, Unfilled(placement.epoch, ((0, 3),), "model.safetensors: it ends"))
        said += effects
        assert [e.member for e in effects if isinstance(e, Tell) and e.value == Retire(placement.epoch)] == [
            first,
            second,
        ]
        asked, effects = placed_by(membership, effects)
    assert asked.barred == {(0, 3): {0, 1}} and not effects, "it is nowhere to be had now"
    assert not [e for e in said if isinstance(e, Dismiss | EndRun)]
    incidents = [e for e in said if isinstance(e, Incident)]
    assert [e.what for e in incidents] == [Happening.UNREAD] * 2 and "model.safetensors" in str(incidents[0])
    assert not [e for e in membership.on(Ticked(), 0.4) if isinstance(e, Replan)]
    for member in (first, second, front):
        say(membership, member, Heartbeat(1, ExpertStats()))
    asked, effects = placed_by(membership, membership.on(Ticked(), 0.6))
    assert asked.barred == {}
    for node, placement in fills_of(effects).items():
        effects = say(membership, node, Filled(placement.epoch, 1))
    (adopt,) = [e.value for e in effects if isinstance(e, Tell) and isinstance(e.value, Adopt)]
    assert any(e == 3 for n in (0, 1) for _, _, e in adopt.placement.held(n))


def test_a_fill_that_never_ends_costs_the_fill_and_its_answer_is_no_offence_later():
    membership, (_, first, second, third) = serving_run(patience=1e9, register=1e9, gateway=1e9)
    _, effects = placed_by(membership, membership.on(Left(third, "killed"), 1.0))
    (placement,) = set(fills_of(effects).values())
    say(membership, first, Filled(placement.epoch))
    effects = membership.on(Ticked(), 601.0)
    assert [e.what for e in effects if isinstance(e, Incident)] == [Happening.UNREAD]
    assert not [e for e in effects if isinstance(e, Dismiss)] and membership.migration.phase is Phase.STEADY
    late = say(membership, second, Filled(placement.epoch))
    assert not [e for e in late if isinstance(e, Dismiss)] and membership.members.find_life(second).serving


def test_who_cannot_read_what_it_comes_back_to_waits_and_is_asked_again():
    membership, (*_, third) = serving_run()
    membership.on(Left(third, "killed"), 1.0)
    back = join(membership, expert_node(2))
    target = membership.migration.placement.with_epoch(1)
    membership.migration.placement = target  # the others have gone on meanwhile
    (told,) = [
        e.value
        for e in say(membership, back, Endpoint("a", {}), Ready(1))
        if isinstance(e, Tell) and isinstance(e.value, FillSlots)
    ]
    assert told.placement.epoch == 1
    effects = say(membership, back, Unfilled(1, ((0, 3),), "EIO"))
    assert not fills_of(effects) and membership.members.find_life(back).alive
    assert not fills_of(membership.on(Ticked(), 0.3))
    assert fills_of(membership.on(Ticked(), 0.6)) == {back: target}
    say(membership, back, Filled(1))
    assert membership.members.find_life(back).serving


@pytest.mark.parametrize("fails", [1, 2, 5, 20])
def test_between_two_tries_is_twice_the_time_up_to_a_limit(fails):
    unreadable, now, waits = UnreadableExperts(), 0.0, []
    for _ in range(fails):
        unreadable.note_unread(0, [(0, 1)], now)
        began = now
        while not unreadable.retry_due(now):
            now += 0.25
        waits.append(now - began)
    assert waits == [min(0.5 * 2**i, 10.0) for i in range(fails)]
    assert not unreadable.note_unread(0, [(0, 1)], now), "it was told of"
    assert not unreadable.retry_due(now) and unreadable.retry_due(now + 10.0)
    unreadable.note_all_read()
    assert unreadable.note_unread(0, [(0, 1)], now)
    assert unreadable.retry_due(now + 0.5)


def test_an_expert_that_many_nodes_could_not_read_is_asked_of_none():
    unreadable = UnreadableExperts()
    for node in range(TRIED):
        unreadable.note_unread(node, [(0, 1)], 0.0)
    unreadable.note_unread(0, [(0, 2)], 0.0)
    assert unreadable.barred(range(9)) == {(0, 1): frozenset(range(9)), (0, 2): {0}}
    assert unreadable.waits_for_node(0) and not unreadable.waits_for_node(8)
