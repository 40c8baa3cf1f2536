"""What a new controller makes of the nodes that come back: epochs, lives, and who is sent away."""

import pytest

from afserve.control.membership.events import Rejoined, TakenOver, Tell
from afserve.control.membership.members import NO_EPOCH
from afserve.control.membership.membership import Membership
from afserve.control.membership.recovery import OnLoss, Rules
from afserve.control.membership.roster import State
from afserve.control.membership.takeover import NodeClaim, Takeover, inherit
from afserve.control.node.account import NodeAccount
from afserve.control.wire.placement_values import Adopt, Adopted, Filled, FillSlots, Retire
from afserve.control.wire.values import (
    Assigned,
    Drain,
    Drained,
    Endpoint,
    Gateways,
    Identity,
    NodeStage,
    Ready,
    Register,
    Shutdown,
    Standing,
)
from afserve.errors import RendezvousError
from afserve.member import Life, NodeId, Role, attention_node, expert_node
from afserve.placement.placement import Placement
from tests.control.test_controller import RUN
from tests.control.test_membership import run_of

INITIAL = Placement.contiguous(layers=1, experts=2, nodes=2)
OLD, NEW = INITIAL.with_epoch(3), INITIAL.with_epoch(4)


def front(held, asked=(), stage=NodeStage.SERVING, generation=0):
    return Standing(generation, stage, held=(held,), asked=tuple(asked), newest=9)


def holder(*held, asked=(), stage=NodeStage.LOADED, generation=0):
    return Standing(generation, stage, held=held, asked=tuple(asked), newest=9)


def found(fronts=(), experts=()):
    takeover = Takeover(0.0)
    both = [(attention_node(i), s) for i, s in enumerate(fronts)]
    both += [(expert_node(i), s) for i, s in enumerate(experts)]
    for number, (node, standing) in enumerate(both):
        takeover.claim(NodeClaim(number, node, Register(node.role, node.index, 1, "h", "1"), standing))
    return takeover, inherit(takeover, INITIAL)


@pytest.mark.parametrize(
    ("fronts", "experts", "in_force", "following"),
    [
        ([front(OLD)], [holder(OLD)], 3, None),
        ([front(OLD)], [holder(OLD, NEW), holder(OLD, asked=[NEW])], 3, None),  # nobody was asked to adopt it
        ([front(OLD, [NEW]), front(OLD)], [holder(OLD, NEW)], 3, 4),
        ([front(NEW), front(OLD)], [holder(OLD, NEW)], 3, 4),
        ([front(NEW), front(NEW)], [holder(OLD, NEW)], 4, None),
        ([front(OLD), front(NEW)], [holder(NEW)], 4, None),  # the first was lost before, and does not know it
        ([front(OLD)], [holder(NEW)], 4, None),
        ([front(OLD, stage=NodeStage.LOADED)], [holder(OLD), holder(OLD, NEW)], 4, None),
        ([], [], 0, None),
    ],
)
def test_what_an_attention_node_was_asked_to_adopt_is_finished_and_all_else_given_up(
    fronts, experts, in_force, following
):
    _, inherited = found(fronts, experts)
    assert inherited.placement.epoch == in_force
    assert (inherited.following and inherited.following.epoch) == following
    assert inherited.newest == (9 if fronts or experts else 0)


def test_an_attention_node_that_routes_by_a_given_up_epoch_is_sent_away():
    takeover, inherited = found([front(OLD), front(NEW)], [holder(NEW)])
    stale, good = takeover.claims_of(Role.ATTENTION)
    inherited.check_claim(good)
    with pytest.raises(RendezvousError, match="attention-0 knows epoch 3, epoch 4 is in force"):
        inherited.check_claim(stale)


def test_an_expert_node_serves_once_it_holds_all_that_may_be_routed_to_it():
    _, inherited = found([front(OLD, [NEW])], [holder(OLD, NEW)])
    assert inherited.state(Role.EXPERT, holder(OLD, NEW)) == (State.READY, 3, 3)
    assert inherited.state(Role.EXPERT, holder(OLD, asked=[NEW])) == (State.LOADING, 3, 3)
    assert inherited.given_up(Role.EXPERT, holder(OLD, asked=[NEW])) == [4]
    assert inherited.obsolete(Role.EXPERT, holder(INITIAL, OLD, NEW)) == [0]
    assert inherited.state(Role.EXPERT, holder()) == (State.LOADING, NO_EPOCH, NO_EPOCH)


def test_of_two_lives_the_later_counts_and_of_two_streams_of_one_life_too():
    takeover = Takeover(0.0)
    register = Register("expert", 0, 1, "h", "1")
    first, second, late = (
        NodeClaim(number, expert_node(0), register, holder(OLD, generation=generation))
        for number, generation in enumerate((1, 1, 0))
    )
    assert takeover.claim(first) is None
    assert takeover.claim(second) is first
    assert takeover.claim(late) is late
    takeover.withdraw(0)
    assert takeover.all_back({Role.EXPERT: 1}) and not takeover.all_back({Role.ATTENTION: 1})


@pytest.mark.parametrize("role", [Role.ATTENTION, Role.GATEWAY])
@pytest.mark.parametrize(
    ("stage", "told"), [(NodeStage.DRAINING, [Drain()]), (NodeStage.DRAINED, [Shutdown()])]
)
def test_whoever_drains_is_asked_to_once_more_and_whoever_has_drained_goes(role, stage, told):
    """Nobody waits for an answer that the controller before this one had, or for one that is given only once."""
    membership = Membership(run_of(attention=1, experts=1).deployment, "1.0", Rules(OnLoss.RECOVER), life=1)
    membership.on(TakenOver(), 0.0)
    held = (membership.deployment.placement,)
    going = NodeId(role, 1)
    nodes = {
        attention_node(0): Standing(0, NodeStage.SERVING, 1, Endpoint("", {}), held=held),
        going: Standing(0, stage, 1, Endpoint("", {}), held=held if role is Role.ATTENTION else ()),
        expert_node(0): Standing(0, NodeStage.LOADED, 1, Endpoint("a", {}), held=held),
    }
    for number, (node, standing) in enumerate(nodes.items()):
        effects = membership.on(
            Rejoined(number, Register(node.role, node.index, 1, "h", "1.0", standing=standing)), 0.1
        )
    assert membership.settled
    of_it = [e.value for e in effects if isinstance(e, Tell) and e.member.node == going]
    assert [value for value in of_it if isinstance(value, Drain | Shutdown)] == told


def account(role):
    kept = NodeAccount()
    kept.said(Register(role, None, 1, "h", "1"))
    assert not kept.grace  # nobody knows it yet
    kept.told(Assigned(Life(NodeId(role, 2), 5), RUN))
    return kept


def test_what_was_asked_is_told_apart_from_what_was_done():
    kept = account(Role.EXPERT)
    kept.said(Endpoint("shm:1", {"a": "b"}))
    kept.said(Identity({"x": "1"}))
    kept.said(Identity({"y": "2"}))
    kept.said(Ready(7, isa="avx2"))
    kept.told(FillSlots(OLD))
    kept.told(FillSlots(NEW))
    kept.said(Filled(3))
    said = kept.register()
    standing = said.standing
    assert said.index == 2 and standing.generation == 5 and standing.stage is NodeStage.LOADED
    assert standing.identity.things == {"x": "1", "y": "2"} and standing.resident_bytes == 7
    assert standing.isa == "avx2"
    assert [p.epoch for p in standing.held] == [0, 3] and [p.epoch for p in standing.asked] == [4]
    kept.told(Retire(4))
    kept.told(Retire(0))
    kept.said(Filled(4))  # it was given up meanwhile
    standing = kept.register().standing
    assert [p.epoch for p in standing.held] == [3] and not standing.asked and standing.newest == 4


def test_an_attention_node_serves_once_it_was_told_of_gateways_and_leaves_when_it_is_told_to():
    kept = account(Role.ATTENTION)
    assert kept.register().standing.stage is NodeStage.LOADING
    kept.said(Ready(1))
    assert kept.register().standing.stage is NodeStage.LOADED
    kept.told(Gateways(((0, ""),)))
    kept.told(Adopt(OLD))
    kept.said(Adopted(3))
    assert kept.register().standing == Standing(5, NodeStage.SERVING, 1, held=(OLD,), newest=3)
    kept.told(Drain())
    assert kept.register().standing.stage is NodeStage.DRAINING
    kept.said(Drained())
    assert kept.register().standing.stage is NodeStage.DRAINED
    assert kept.grace == RUN.engine.orphan_grace
    kept.told(Shutdown())
    assert not kept.grace
