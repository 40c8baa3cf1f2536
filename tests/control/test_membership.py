"""Single rules of the membership, event by event: what `test_schedules` cannot say who it is about."""

import pytest

from afserve.config import EngineConfig, ModelSource
from afserve.control.membership.desired import Deployment
from afserve.control.membership.events import (
    Admit,
    Begun,
    Dismiss,
    DrainNode,
    EndRun,
    Incident,
    Joined,
    Known,
    Left,
    Said,
    Scale,
    Settled,
    Start,
    Tell,
    Ticked,
)
from afserve.control.membership.recovery import GATEWAY_SECONDS, OnLoss, Rules
from afserve.control.membership.state import Membership
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
from afserve.member import NodeId, Role, attention_node, expert_node
from afserve.placement.placement import Placement


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
    assert not membership.members.missing() and not membership.ended


def test_the_place_of_a_gateway_that_came_by_itself_may_be_wanted_later():
    membership = run_of(gateways=1, on_loss=OnLoss.RECOVER, backoff=0.1)
    for node in membership.deployment.nodes:
        say(membership, join(membership, node), Endpoint("a", {}), Ready(1))
    guest = join(membership, NodeId(Role.GATEWAY, None))
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
    gateway = join(membership, NodeId(Role.GATEWAY, None))
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
    monkeypatch.setattr(membership, "_replan", lambda: looked.append(1) or [])
    assert say(membership, members[1], *[Heartbeat(1, ExpertStats())] * 5) == [] and not looked
    membership.on(Ticked(), 1.0)
    assert looked
