"""Whatever only advises may fail: serving goes on, it is logged once, and the adviser is asked again later."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.adviser import FIRST_SECONDS, LONGEST_SECONDS, Adviser
from afserve.clock import FakeClock
from afserve.comm.kv.split import SplitMember
from afserve.control import request_trace
from afserve.control.admission import Admission, Objectives
from afserve.control.affinity import Affinity
from afserve.control.controller import Controller
from afserve.control.controller_wiring import Wiring
from afserve.control.homes import HomeRules, Homes
from afserve.control.membership.balancing import BalanceRules
from afserve.control.membership.events import Happening, Incident, Left, Replan, Said, Start, Ticked
from afserve.control.membership.recovery import OnLoss, Rules
from afserve.control.moves import Moves
from afserve.control.node import spans as spans_thread
from afserve.control.node.counts import DrawnCounts
from afserve.control.node.heartbeat import HeartbeatThread
from afserve.control.node.journal import Journal
from afserve.control.node.prefixes import PrefixTeller
from afserve.control.node.recording import Recorder
from afserve.control.node.report import Reporter
from afserve.control.node.spans import NodeSpans
from afserve.control.node.stream import ControlStream
from afserve.control.node.tracing import TraceSender
from afserve.control.node.work_spans import WorkSpans
from afserve.control.prompts import Prompts
from afserve.control.rebalance_loop import RebalanceLoop
from afserve.control.request_trace import RequestTrace
from afserve.control.requests import Requests
from afserve.control.wire.placement_values import Routed
from afserve.control.wire.request_values import Prefixes, Submit, ToAttention
from afserve.control.wire.values import (
    AttentionNodes,
    AttentionPeer,
    Heartbeat,
    Noted,
    Progress,
    Query,
    Record,
    Recorded,
    Traced,
)
from afserve.engine.kv.moving.copying import Copier
from afserve.engine.kv.prefix_keys import HeldPrefixes
from afserve.engine.scheduling.request import GenerationRequest, Origin, SamplingParams
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.errors import OverloadedError
from afserve.member import attention_life, attention_node, expert_node
from afserve.placement.rebalance.stats import RoutedRows
from afserve.tracing.trace import Trace
from tests.control.test_controller import RUN, TOKEN
from tests.control.test_moving import play
from tests.control.test_scaling import served
from tests.patching import patch_library


class Oops(Exception):
    """Planted."""


def broken(*_, **__):
    raise Oops("planted")


def told(caplog):
    return [r for r in caplog.records if r.name == "afserve.adviser"]


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_it_rests_longer_each_time_and_never_for_ever(fails, step):
    adviser, now, rests = Adviser("advice"), 0.0, []
    for fail in fails:
        asked: list[int] = []

        def advice(asked=asked, fail=fail):
            asked.append(1)
            return broken() if fail else 7

        answer = adviser.ask(now, advice, 3)
        assert answer == (7 if asked and not fail else 3)
        if asked and fail:
            rests.append(adviser.rest_left(now))
        if asked and not fail:
            rests.clear()
        assert rests == sorted(rests) and all(FIRST_SECONDS <= r <= LONGEST_SECONDS for r in rests)
        now += step
    assert not adviser.rests(now + LONGEST_SECONDS)


def test_each_fault_is_logged_once_with_where_it_was(caplog):
    adviser, now = Adviser("balancing"), 0.0
    for _ in range(20):
        adviser.ask(now, broken, None)
        adviser.ask(now, lambda: 1 // 0, None)
        now += LONGEST_SECONDS
        adviser.ask(now, lambda: 1 // 0, None)
        now += LONGEST_SECONDS
    assert len(told(caplog)) == 2 and all(record.exc_info for record in told(caplog))
    assert "balancing failed and rests" in caplog.text and "planted" in caplog.text


def test_what_it_answers_by_raising_passes_and_ends_no_series():
    adviser = Adviser("admission", OverloadedError)

    def refuses():
        raise OverloadedError("later")

    with pytest.raises(OverloadedError):
        adviser.ask(0.0, refuses, None)
    assert not adviser.rests(0.0)


# ---- the controller's


def controller_with(**wiring):
    return Controller(
        RUN, TOKEN, FakeClock(), BalanceRules(act=True), Rules(OnLoss.RECOVER), Wiring(**wiring)
    )


@pytest.fixture
def controller():
    return controller_with()


MEMBER = SimpleNamespace(node=attention_node(0), generation=0)
ROWS = RoutedRows.__new__(RoutedRows)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("balancing", "count_rows", Routed(ROWS)),
        ("recordings", "collect_part", Recorded(1, b"")),
        ("_traces", "keep", Traced(b"x")),
    ],
    ids=["routing counts", "recordings", "traces"],
)
def test_what_nodes_tell_for_the_record_costs_no_node(controller, where, name, value, monkeypatch, caplog):
    if where == "_traces":
        controller.chronicle._traces = SimpleNamespace(keep=broken)
        monkeypatch.setattr(controller.members, "find_life", lambda member: SimpleNamespace(host="h"))
    else:
        part = controller if where == "balancing" else controller.chronicle
        monkeypatch.setattr(getattr(part, where), name, broken)
    for _ in range(3):
        controller._hear(MEMBER, value)
    controller.check()
    assert len(told(caplog)) == 1


def test_stories_for_people_cost_no_node(monkeypatch, caplog):
    controller = controller_with(show_progress=broken, show_incident=broken)
    monkeypatch.setattr(controller.chronicle.incidents, "count_stalls", broken)
    monkeypatch.setattr(controller.chronicle.incidents, "note_incident", broken)
    monkeypatch.setattr(controller.members, "find_life", lambda member: None)
    controller._follow(MEMBER, Heartbeat(1, AttentionStats()))
    controller._carry_out(Incident(Happening.LOST, attention_node(0), "why"))
    loading = SimpleNamespace(node=attention_node(0), serving=False)
    monkeypatch.setattr(controller.members, "find_life", lambda member: loading)
    controller._follow(MEMBER, Progress(0.5, "weights"))
    controller._hear(MEMBER, Noted("a line"))
    controller.check()
    assert len(told(caplog)) == 3, (
        "stories, drawing and progress; the first rests by the time of the incident"
    )


@pytest.mark.parametrize("where", ["age", "think", "decided"])
def test_balance_that_cannot_be_thought_out_ends_nothing(controller, where, monkeypatch, caplog):
    asked = []

    def age(now):
        asked.append(now)
        return object()

    monkeypatch.setattr(controller.balancing, "age", age)
    monkeypatch.setattr(controller.balancing, "think", lambda stats, now: None)
    monkeypatch.setattr(controller.balancing, where, broken)

    async def script():
        for now in range(10):
            await controller.rebalancing.rebalance(float(now))

    asyncio.run(script())
    controller.check()
    assert len(told(caplog)) == 1 and len(asked) in (0, 4), "at 0, 1, 3 and 7 s"
    monkeypatch.setattr(controller.balancing, "imbalance", broken)
    assert controller.rebalancing.imbalance() == (), "the view of the cluster lacks one number"


@pytest.mark.parametrize("lost", [frozenset(), frozenset({1})], ids=["over", "without"])
def test_places_for_experts_are_looked_for_again(controller, lost, monkeypatch, caplog):
    """What a lost node held has to go somewhere: a fault there is tried again until it works."""
    tries, slept = [], []

    def third_time(*_):
        tries.append(1)
        if len(tries) < 3:
            raise Oops("planted")

    async def sleep(seconds):
        slept.append(seconds)

    for name in ("plan_over", "plan_without"):
        monkeypatch.setattr(controller.balancing, name, third_time)
    loop = RebalanceLoop(controller.balancing, FakeClock(), controller._on, lambda: False, sleep)
    asyncio.run(loop.replan_places(Replan(frozenset({0}), lost)))
    controller.check()
    assert len(tries) == 3 and slept == [1.0, 2.0] and len(told(caplog)) == 1


def test_a_question_that_fails_is_answered_so(monkeypatch, caplog):
    heard, controller = [], controller_with(answer_query=broken)
    monkeypatch.setattr(controller, "_tell", lambda member, value: heard.append(value))
    asyncio.run(controller._answer(MEMBER, Query(7, "view")))
    controller.check()
    assert heard[0].number == 7 and "its log says why" in str(heard[0].error)
    assert "planted" not in str(heard[0].error) and "planted" in caplog.text


@pytest.mark.parametrize("name", ["_shortage", "_slowness", "_coverage"])
def test_advice_of_the_membership_ends_nothing(name, monkeypatch, caplog):
    membership, members = served(attention=1, experts=2, on_loss=OnLoss.RECOVER, patience=1e6)
    for method in {
        "_shortage": ["check_shortage"],
        "_slowness": ["judge_stats"],
        "_coverage": ["explain_loss", "check_covered"],
    }[name]:
        part = membership if name == "_shortage" else membership.losses
        monkeypatch.setattr(type(getattr(part, name)), method, broken)
    if name == "_coverage":
        monkeypatch.setattr(type(membership.losses._coverage), "lacking", True)
    membership.on(Said(members[expert_node(0)], Heartbeat(1, ExpertStats())), 10.0)
    membership.on(Ticked(), 10.1)
    assert membership.on(Left(members[expert_node(1)], "killed"), 11.0)
    assert any(isinstance(e, Start) for e in membership.on(Ticked(), 12.0)), "its place is filled again"
    assert not membership.ended and told(caplog)


# ---- a gateway's


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Affinity, "pick"), (Affinity, "told"), (Prompts, "source"), (Admission, "sample"), (Moves, "came")],
)
def test_a_request_finds_its_node_whatever_a_gateways_advisers_do(owner, name, monkeypatch, caplog):
    monkeypatch.setattr(owner, name, broken)
    play(3)
    homes = Homes(Requests(), HomeRules(), FakeClock())
    homes.admit([[1, 2, 3]], Objectives(ttft=1.0))
    sent: list[ToAttention] = []
    stream = SimpleNamespace(life=attention_life(0, 0), number=0, send=sent.append)
    homes.update_nodes(AttentionNodes((AttentionPeer(attention_life(0, 0), True),)))
    homes.entered(stream, ())
    homes.heard(stream, Prefixes((1,), (), anew=True))
    homes.open(GenerationRequest(0, (1, 2, 3), SamplingParams()))
    assert isinstance(sent[-1], Submit)
    homes.check_time()
    if name not in ("source", "came"):  # of runs with phases, and with moved requests, only
        assert told(caplog)


def test_a_request_is_answered_though_it_cannot_be_drawn(monkeypatch, caplog):
    drawn = RequestTrace(Trace("gateway"), FakeClock())
    monkeypatch.setattr(Trace, "slice", broken)
    one = drawn.begin()
    one.token()
    one.end()
    drawn.counts("refused", {"ttft": 1})
    patch_library(monkeypatch, request_trace, "heapq", heappop=broken)
    drawn._advice._until = 0.0
    drawn.begin().end()
    assert len(told(caplog)) >= 1


# ---- a node's


class Heard(ControlStream):
    """A stream that connects to nobody: what was sent on it."""

    def __init__(self):
        super().__init__("127.0.0.1:9", TOKEN)
        self.values = []

    def send(self, value):
        self.values.append(value)


def test_a_sign_of_life_needs_no_statistics(monkeypatch, caplog):
    stream = Heard()
    heartbeat = HeartbeatThread(stream, AttentionStats(), 0.01)
    heartbeat._process = SimpleNamespace(memory_info=broken)
    assert heartbeat.resident_bytes() == 0
    report = Reporter(heartbeat, stream, broken, broken, FakeClock())
    report(at_once=True)
    report(at_once=True)
    heartbeat.start()
    while not stream.values:
        heartbeat._thread.join(0.01)
        assert heartbeat._thread.is_alive()
    heartbeat.stop()
    assert isinstance(stream.values[0], Heartbeat) and len(told(caplog)) == 2


def test_recordings_and_traces_of_a_node_cost_no_step(monkeypatch, caplog):
    node = SimpleNamespace(trace=None, drawn_open=broken)
    recorder = Recorder(node, "attention-0", lambda value: None, clock := FakeClock())
    recorder.begin(Record(1, 0.1))
    clock.advance(1.0)
    recorder.look()
    assert not recorder.active and node.trace is None
    sender = TraceSender(Trace("a"), broken, FakeClock())
    monkeypatch.setattr(sender, "_next", broken)
    sender.start()
    sender.close()
    drawn = DrawnCounts(AttentionStats, undrawn := Trace("a"), FakeClock())
    monkeypatch.setattr(undrawn, "counts", broken)
    assert drawn() == AttentionStats()
    count = iter(range(1, 100))
    work = WorkSpans("expert-0", lambda: ExpertStats(messages=next(count)), broken, "run", clock)
    clock.advance(5.0)
    assert work.stats().messages
    work.close()
    spans = NodeSpans("http://127.0.0.1:9", "a")
    patch_library(monkeypatch, spans_thread, "threading", Thread=broken)
    spans.put({})
    journal = Journal("attention-0", broken)
    parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    journal.ended(journal.begin(Origin("r", parent), 3), 1, "stop")
    assert len(told(caplog)) == 6


def test_copies_and_news_of_the_cache_cost_no_step(caplog):
    clock = FakeClock()
    node: Any = SimpleNamespace(written_names=broken)
    wire: Any = SimpleNamespace()
    copier = Copier(node, wire, 1, clock)
    copier.copy_to([SplitMember(0, "b")])
    for _ in range(3):
        copier.turn()
    copier._buddies[0].offer = 5
    copier._buddies[0].offered = None  # type: ignore[assignment]  # planted
    copier.settled(5, 1)
    assert copier._buddies[0].offer != 5 or len(told(caplog)) == 2
    teller = PrefixTeller(HeldPrefixes(), cast(Any, SimpleNamespace(lives=broken)), clock)
    clock.advance(5.0)
    teller.look()
    assert len(told(caplog)) >= 2
