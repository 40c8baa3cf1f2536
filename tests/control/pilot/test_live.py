"""A pilot beside a deployment: what it sees there, what it asks for, and that no fault of it goes further."""

import logging
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from afserve.cli.status import pilot_lines
from afserve.clock import FakeClock
from afserve.control.pilot.acting import PoolChanges
from afserve.control.pilot.advice import Advice, Effect, Outcome
from afserve.control.pilot.live import LiveView
from afserve.control.pilot.loop import PilotLoop
from afserve.control.pilot.measured import MeasuredModel
from afserve.control.pilot.observed import Observed, PoolLoad
from afserve.control.pilot.plan import Planner
from afserve.control.pilot.policy import Policy
from afserve.control.pilot.settings import ACT, ADVISE
from afserve.control.pilot.sizes import PoolSizes
from afserve.control.wire.change_values import Change, Changed, NewPhase, NewRole, ScaleTo
from afserve.control.wire.load_values import ClassCounts, GatewayLoad, LoadCounts, added
from afserve.control.wire.view_values import ClusterView
from afserve.control.wire.views import decode_view, encode_view
from afserve.engine.stats import AttentionStats
from afserve.errors import DoesNotFitError
from afserve.member import AttentionPhase, NodeId, Role
from afserve.server.metrics.nodes import piloted
from tests.control.pilot.world import LIMITS, WANTED, Told

EFFECT = Effect(1.0, 0.02, (0.5, 2.0), (0.01, 0.04))
NAMES = {
    "prefill": ["attention-0", "attention-3"],
    "decode": ["attention-1", "attention-2"],
    "experts": ["expert-0", "expert-1"],
}
ADVICE = Advice(1, 0.0, PoolSizes(1, 2, 2), PoolSizes(1, 3, 2), "more comes", EFFECT, EFFECT)


class Scripted(Policy):
    def __init__(self, advice):
        super().__init__(Planner(MeasuredModel(), WANTED, LIMITS))
        self.says = advice

    def look(self, seen):
        if isinstance(self.says, Exception):
            raise self.says
        if self.says is not None:
            self.advices.append(self.says)
        return self.says


def done(change: Change) -> Changed:
    return Changed({})


def loop(mode, policy, change=done, clock=None, may_act=lambda: True):
    seen = Observed(0.0, PoolSizes(1, 2, 2), PoolLoad())
    changes = PoolChanges(change, NAMES.__getitem__)
    return PilotLoop(mode, policy, lambda: seen, changes, clock or FakeClock(), may_act=may_act)


def test_who_advises_asks_for_nothing():
    asked: list[Change] = []
    one = loop(ADVISE, Scripted(ADVICE), asked.append)
    one.look()
    view = one.view()
    assert asked == [] and view.mode == ADVISE and view.counts["advised"] == 1 and not view.counts["acted"]
    assert "1:2:2 to 1:3:2, since more comes" in view.advices[-1]


def test_who_acts_asks_for_the_pools_that_change():
    asked: list[Change] = []
    loop(ACT, Scripted(ADVICE), asked.append).look()
    assert asked == [ScaleTo({"decode": "3"})]
    plain = Advice(1, 0.0, PoolSizes(0, 2, 2), PoolSizes(0, 1, 3), "less", EFFECT, EFFECT)
    loop(ACT, Scripted(plain), asked.append).look()
    assert asked[-1] == ScaleTo({"attention": "1", "experts": "3"})


@pytest.mark.parametrize(
    ("old", "new", "asked"),
    [
        ((2, 2, 2), (1, 3, 2), [NewPhase("attention-3", "decode")]),
        ((2, 2, 2), (3, 1, 2), [NewPhase("attention-2", "prefill")]),
        ((2, 2, 2), (1, 4, 3), [NewPhase("attention-3", "decode"), ScaleTo({"decode": "4", "experts": "3"})]),
        ((2, 2, 2), (3, 3, 2), [ScaleTo({"prefill": "3", "decode": "3"})]),
    ],
)
def test_nodes_that_are_there_take_another_part_before_others_come(old, new, asked):
    did: list[Change] = []

    def change(one: Change) -> Changed:
        did.append(one)
        return Changed({})

    PoolChanges(change, NAMES.__getitem__).follow(PoolSizes(*old), PoolSizes(*new))
    assert did == asked


def test_where_there_is_no_room_a_node_gives_its_place_to_one_of_another_role():
    did: list[Change] = []

    def change(asked):
        did.append(asked)
        if isinstance(asked, ScaleTo):
            raise DoesNotFitError("3 expert nodes need 40 GiB; this machine has 20")
        return Changed({}, ("attention-4",) if isinstance(asked, NewRole) else ())

    changes = PoolChanges(change, NAMES.__getitem__)
    changes.follow(PoolSizes(2, 2, 2), PoolSizes(2, 3, 1))
    assert did[1:] == [NewRole("expert-1", "attention"), NewPhase("attention-4", "decode")]
    changes.follow(PoolSizes(2, 2, 2), PoolSizes(2, 1, 4))
    assert did[4:] == [NewRole("attention-2", "expert")], "as far as nodes go, others come"
    with pytest.raises(DoesNotFitError):
        changes.follow(PoolSizes(2, 2, 2), PoolSizes(2, 2, 3))


@pytest.mark.parametrize(
    ("old", "new", "did"),
    [
        ((0, 3, 2), (1, 1, 3), [NewRole("attention-2", "expert")]),
        ((1, 2, 2), (0, 4, 1), [NewRole("expert-1", "attention")]),
        ((1, 2, 2), (0, 3, 3), None),
    ],
)
def test_pools_that_have_other_names_than_before_change_places(old, new, did):
    """Such as after somebody set the only node that read prompts to do both."""
    names = NAMES | {"attention": ["attention-0", "attention-1", "attention-2"]}
    asked: list[Change] = []

    def change(one):
        if isinstance(one, ScaleTo):
            raise DoesNotFitError("no room")
        asked.append(one)
        return Changed({})

    changes = PoolChanges(change, names.__getitem__)
    if did is None:
        with pytest.raises(DoesNotFitError):
            changes.follow(PoolSizes(*old), PoolSizes(*new))
        return
    changes.follow(PoolSizes(*old), PoolSizes(*new))
    assert asked == did


def test_what_was_done_before_a_refusal_is_counted(caplog):
    def change(one):
        if isinstance(one, ScaleTo):
            raise DoesNotFitError("4 decode nodes need 40 GiB")
        return Changed({})

    turning = Advice(1, 0.0, PoolSizes(2, 2, 2), PoolSizes(1, 4, 2), "more comes", EFFECT, EFFECT)
    one = loop(ACT, Scripted(turning), change)
    one.look()
    assert one.view().counts["acted"] == one.view().counts["refused"] == 1
    assert "1 of its changes made, no more: 4 decode nodes need 40 GiB" in caplog.text


def test_outside_its_hours_it_only_advises():
    def never(change):
        raise AssertionError(f"{change} was asked for")

    one = loop(ACT, Scripted(ADVICE), never, may_act=lambda: False)
    one.look()
    assert one.view().counts["advised"] == 1 and not one.view().counts["acted"]


def test_a_refusal_is_said_once_and_is_no_fault(caplog):
    def refuse(change):
        raise DoesNotFitError("3 attention nodes need 40 GiB; this machine has 20")

    one = loop(ACT, Scripted(ADVICE), refuse)
    with caplog.at_level(logging.WARNING):
        one.look()
        one.look()
    assert sum("need 40 GiB" in record.message for record in caplog.records) == 1
    assert one.view().counts["refused"] == 2


def test_a_fault_rests_the_pilot_and_goes_no_further(caplog):
    clock = FakeClock()
    policy = Scripted(ZeroDivisionError("a bug"))
    one = loop(ACT, policy, clock=clock)
    for _ in range(5):
        one.look()
    assert "the pilot, which sizes pools failed and rests" in caplog.text
    policy.says = ADVICE
    one.look()
    assert one.view().counts["advised"] == 0, "it rests"
    clock.advance(600)
    one.look()
    assert one.view().counts["advised"] == 1


@pytest.mark.slow
def test_what_a_pilot_says_reaches_other_gateways_and_metrics():
    told = Told(sizes=PoolSizes(1, 1, 1))
    one = PilotLoop(ADVISE, told.policy, told.seen, PoolChanges(done, NAMES.__getitem__), FakeClock())
    told.play(30, 900)
    view = one.view()
    assert decode_view(encode_view(ClusterView(1, (), pilot=view))).pilot == view
    assert decode_view(encode_view(ClusterView(1, ()))).pilot is None
    names = {family.names[0] for family in piloted(view)}
    assert names == {
        "afserve_pilot_advised_nodes",
        "afserve_pilot_advices",
        "afserve_pilot_rate",
        "afserve_pilot_rate_soon",
        "afserve_pilot_compared_seconds",
    }
    assert list(piloted(None)) == []


def test_what_came_of_an_advice_is_said_with_what_was_expected(caplog):
    """In the log, in the status, in metrics and in what other gateways hear; by the interval that was printed."""
    policy = Scripted(None)
    one = loop(ADVISE, policy, clock=FakeClock(100.0))
    policy.advices.extend([ADVICE, *(replace(ADVICE, number=number) for number in range(2, 9))])
    policy.outcomes.append(Outcome(ADVICE, 70.0, False, 2.5, 0.02))
    policy.judged = 1
    with caplog.at_level(logging.INFO):
        one.look()
    numbers = [text.split(":")[1] for text in one.view().advices]
    assert numbers == [f" advice {number}" for number in (1, 4, 5, 6, 7, 8)], "the newest, and those compared"
    words = (
        "advice 1, 1:2:2 to 1:3:2, was not followed: first token 2.5 s (expected 0.5 to 2, missed); "
        "20 ms a token (expected 10 to 40, held)"
    )
    view = one.view()
    assert words in caplog.text and view.outcomes == (f"30 s ago: {words}",)
    assert (view.counts["compared"], view.counts["held"]) == (2, 1)
    pilot = {"mode": view.mode, "advices": view.advices, "outcomes": view.outcomes}
    lines = pilot_lines({"pilot": {**pilot, "counts": view.counts, "figures": view.figures}})
    assert lines[0].endswith("1 of 2 as expected") and lines[-2].startswith("  100 s ago: advice 8: 1:2:2 to")
    assert lines[-1] == f"  30 s ago: {words}"
    (family,) = [family for family in piloted(view) if family.names == ("afserve_pilot_compared_seconds",)]
    assert {tuple(dict(one.labels).values()): one.value for one in family.samples} == {
        ("ttft", "from"): 0.5,
        ("ttft", "to"): 2.0,
        ("ttft", "measured"): 2.5,
        ("tpot", "from"): 0.01,
        ("tpot", "to"): 0.04,
        ("tpot", "measured"): 0.02,
    }


def test_those_that_read_prompts_do_not_run_yet():
    state: Any = SimpleNamespace(
        phase_of=[AttentionPhase.PREFILL, AttentionPhase.DECODE, None].__getitem__,
        serving=lambda role: [],
        leaving=(),
        settled=False,
    )
    members: list[Any] = [
        SimpleNamespace(
            id=index,
            node=NodeId(Role.ATTENTION, index),
            stats=AttentionStats(running=5 * 10**index, queued_tokens=7),
            serving=True,
        )
        for index in range(3)
    ]
    seen = LiveView(state).observe(1.0, members, {})
    assert seen.running == 50 + 500, "a node that does both decodes"
    assert seen.queued_tokens == 21


def test_a_node_that_turns_leaves_its_seconds_with_the_pool_that_it_was_in():
    phases = [AttentionPhase.PREFILL, AttentionPhase.PREFILL, AttentionPhase.DECODE]
    state: Any = SimpleNamespace(
        phase_of=phases.__getitem__, serving=lambda role: [], leaving=(), settled=False
    )
    view = LiveView(state)

    def seen(at, seconds):
        members: list[Any] = [
            SimpleNamespace(
                id=index,
                node=NodeId(Role.ATTENTION, index),
                stats=AttentionStats(busy_seconds=seconds),
                serving=True,
            )
            for index in range(3)
        ]
        return view.observe(at, members, {})

    before = seen(1.0, 100.0)
    phases[1] = AttentionPhase.DECODE
    after = seen(2.0, 101.0)
    assert after.follows(before), "an advice that turns a node is compared with what came of it"
    load = after.since(before).load
    assert (load.prefill_busy, load.decode_busy) == (1.0, 2.0)


def test_what_was_done_before_a_controller_took_over_happens_at_no_moment():
    """Gateways say their sums later than nodes do: those of hours would be the rate of one look."""
    state: Any = SimpleNamespace(
        phase_of=lambda index: AttentionPhase.DECODE, serving=lambda role: [], leaving=(), settled=False
    )
    view = LiveView(state)

    def seen(at, seconds, loads):
        stats = AttentionStats(busy_seconds=seconds, steps=int(10 * seconds))
        node: Any = SimpleNamespace(id=0, node=NodeId(Role.ATTENTION, 0), stats=stats, serving=True)
        return view.observe(at, [node], loads)

    def said(came):
        return {"gateway-0": GatewayLoad(LoadCounts(came=came), {"chat": ClassCounts(came)})}

    looks = [seen(0.0, 5000.0, {}), seen(1.0, 5000.5, said(9000)), seen(2.0, 5001.0, said(9004))]
    windows = [new.since(old) for old, new in pairwise(looks)]
    assert [(one.load.came, one.load.decode_busy, one.load.decode_steps) for one in windows] == [
        (0, 0.5, 5),
        (4, 0.5, 5),
    ]
    assert windows[1].classes["chat"].came == 4


def test_nodes_have_the_pool_of_what_they_do_now_and_those_that_leave_have_none():
    phases = [AttentionPhase.PREFILL, AttentionPhase.DECODE, AttentionPhase.BOTH]
    roles = (
        (Role.ATTENTION, 0),
        (Role.ATTENTION, 1),
        (Role.ATTENTION, 2),
        (Role.EXPERT, 0),
        (Role.GATEWAY, 0),
    )
    state: Any = SimpleNamespace(
        phase_of=phases.__getitem__, staying=lambda: [NodeId(role, index) for role, index in roles]
    )
    view = LiveView(state)
    assert view.names("prefill") == ["attention-0"]
    assert view.names("decode") == view.names("attention") == ["attention-1", "attention-2"]
    assert view.names("experts") == ["expert-0"]


def test_loads_of_gateways_add_up():
    one = GatewayLoad(LoadCounts(came=2, first_seconds=0.5), {"chat": ClassCounts(2, first_late=1)})
    other = GatewayLoad(LoadCounts(came=1), {"bulk": ClassCounts(1)})
    assert added([one, one, other]) == GatewayLoad(
        LoadCounts(came=5, first_seconds=1.0), {"bulk": ClassCounts(1), "chat": ClassCounts(4, first_late=2)}
    )
    assert added([]) == GatewayLoad()


def test_status_says_which_classes_are_in_time():
    figures = {"rate": 2.0, "in_time_chat": 0.985, "in_time_bulk": 1.0}
    lines = pilot_lines(
        {"pilot": {"mode": "act", "advices": [], "outcomes": [], "counts": {}, "figures": figures}}
    )
    assert lines[1:] == ["  in time: chat 98.5%, bulk 100.0%"]


@pytest.mark.parametrize(
    "pilot", [None, {"mode": "act", "advices": ["a"], "outcomes": ["b"], "counts": {}, "figures": {}}]
)
def test_status_shows_it(pilot):
    lines = pilot_lines({"pilot": pilot})
    assert (
        lines == [] if pilot is None else (lines[0].startswith("pilot (act)") and lines[1:] == ["  a", "  b"])
    )
