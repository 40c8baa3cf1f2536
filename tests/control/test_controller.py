"""The controller and its frontend over real gRPC streams, with scripted nodes in threads of this process."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from afserve import __version__
from afserve.clock import FakeClock, MonotonicClock
from afserve.config import EngineConfig, ModelSource
from afserve.control import identifying
from afserve.control.backend import ServedModel
from afserve.control.controller import Controller
from afserve.control.controller_wiring import Wiring
from afserve.control.frontend import Frontend
from afserve.control.gateway import Gateway
from afserve.control.membership import recovery
from afserve.control.membership.events import Place
from afserve.control.membership.losses import Losses
from afserve.control.membership.recovery import OnLoss, Rules
from afserve.control.membership.roster import State
from afserve.control.node.gateways import FromGateway, GatewayStreams
from afserve.control.node.stream import ATTEND, ControlStream, Stream
from afserve.control.queries import OwnQueries
from afserve.control.wire import messages
from afserve.control.wire.desired import Deployment
from afserve.control.wire.request_values import (
    Attend,
    Cancel,
    Refused,
    Submit,
    Tokens,
)
from afserve.control.wire.values import (
    Assigned,
    AttentionNodes,
    AttentionPeer,
    Drain,
    Drained,
    Endpoint,
    ExpertPeer,
    Failed,
    Gateways,
    Identity,
    Peers,
    Ready,
    Register,
    Shutdown,
)
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams, TokenEvent
from afserve.errors import (
    AuthError,
    CheckpointError,
    DeadlineError,
    OverloadedError,
    PeerLost,
    RendezvousError,
    UnavailableError,
)
from afserve.launch.processes.supervisor import keep_port
from afserve.member import Role, attention_life, attention_node, expert_life, expert_node
from afserve.placement.placement import Placement

TOKEN = "a-token"
PLACEMENT = Placement.contiguous(layers=1, experts=2, nodes=1)
COUNTS = {Role.ATTENTION: 1, Role.EXPERT: 1}
RUN = Deployment(ModelSource("/m", "m"), EngineConfig(64, 9), COUNTS, "f", PLACEMENT)
SECONDS = 60.0
RECOVER = Rules(OnLoss.RECOVER)


class ScriptedNode(threading.Thread):
    """Registers, becomes ready, then echoes each prompt's tokens one by one until told to stop."""

    def __init__(
        self, address, role="attention", agreed=None, token=TOKEN, version=__version__, fail=None, things=None
    ):
        super().__init__(daemon=True)
        self.address, self.role, self.agreed, self.token = address, role, agreed or {"hidden": "4"}, token
        self.version, self.fail, self.things = version, fail, things
        self.heard, self.raised, self.leave = [], None, threading.Event()

    def run(self):
        try:
            with ControlStream(self.address, self.token) as stream:
                stream.send(Register(self.role, None, 1, "host", self.version))
                assigned = stream.expect(Assigned, SECONDS, "an assignment")
                assert isinstance(assigned, Assigned)
                self.heard.append(assigned)
                stream.send(Endpoint("shm:0" if self.role == "expert" else "", self.agreed))
                if self.role == "attention":
                    self.heard.append(stream.expect(Peers, SECONDS, "peers"))
                if self.fail is not None:
                    stream.send(Failed(self.fail))
                    return
                if self.things is not None:
                    stream.send(Identity(self.things))
                attend = Attend(assigned.life)
                self.gateways = GatewayStreams(
                    lambda gateway: attend, self.address, self.token, stream.deliver
                )
                stream.send(Ready(1 << 20))
                self.serve(stream)
        except Exception as error:  # noqa: BLE001  told to the test
            self.raised = error

    def serve(self, stream):
        while not self.leave.is_set():
            self.gateways.redial()
            for command in stream.receive(0.02):
                self.heard.append(command)
                match command:
                    case Shutdown():
                        self.gateways.close()
                        return
                    case Drain():
                        stream.send(Drained())
                    case Gateways():
                        self.gateways.update(command)
                    case FromGateway(gateway, _, None):
                        self.gateways.lost(gateway)
                    case FromGateway(_, _, Submit(request)):
                        self.answer(request)

    def answer(self, request):
        send = lambda value: self.gateways.send(0, value)  # noqa: E731
        if request.params.max_tokens == 99:
            send(Refused(request.handle, OverloadedError("full", retry_after=2.0)))
        elif request.params.max_tokens != 98:  # 98 stays open
            *most, last = request.prompt_ids
            for token in most:
                send(Tokens((TokenEvent(request.handle, (token,)),)))
            send(Tokens((TokenEvent(request.handle, (last,), "length"),)))


class Nodes(list):
    """Scripted nodes, and what the controller asked of its own copy."""

    def __init__(self, nodes, asked):
        super().__init__(nodes)
        self.asked = asked


@asynccontextmanager
async def serving(*, clock=None, rules=None, roles=("attention", "expert"), own=None, **changes):
    """A controller, its frontend and scripted nodes that are on their way."""
    gateway, clock = Gateway(TOKEN), clock or MonotonicClock()
    asked: list[tuple[bool, Callable[[float], None], Future[Identity]]] = []
    wiring = Wiring(
        tell_failure=gateway.fail, tell_attention=gateway.update_nodes, read_own=own(asked) if own else None
    )
    controller = Controller(RUN, TOKEN, clock, rules=rules, wiring=wiring)
    frontend = Frontend(
        OwnQueries(controller, {"why": "because"}, clock), gateway, ServedModel("m", "/m", 64, 9, 0)
    )
    address = await controller.start(also=[gateway.handler])
    nodes = Nodes((ScriptedNode(address, role, **changes.get(role, {})) for role in roles), asked)
    for node in nodes:
        node.start()
    try:
        yield controller, frontend, nodes
    finally:
        await controller.stop()
        gateway.stop()
        for node in nodes:
            node.leave.set()
            await asyncio.to_thread(node.join, SECONDS)
            assert not node.is_alive()


async def ready(controller, frontend):
    await asyncio.wait_for(controller.wait_ready(), SECONDS)
    await asyncio.wait_for(frontend.wait_attended(), SECONDS)


def ask(*prompt, max_tokens=16):
    return GenerationRequest(0, prompt, SamplingParams(max_tokens=max_tokens))


async def answer(frontend, request):
    async with aclosing(frontend.open(request).events()) as events:
        return [token async for event in events for token in event.token_ids]


def test_from_registration_to_tokens_to_shutdown():
    async def scenario():
        async with serving() as (controller, frontend, (attention, expert)):
            assert not frontend.ready()
            with pytest.raises(OverloadedError, match="starting"):
                await answer(frontend, ask(1))
            await ready(controller, frontend)
            assert attention.heard[:2] == [
                Assigned(attention_life(0, 0), RUN),
                Peers((ExpertPeer(expert_life(0, 0), "shm:0"),)),
            ]
            answers = await asyncio.gather(*(answer(frontend, ask(i, 2, 3)) for i in range(20)))
            assert answers == [[i, 2, 3] for i in range(20)]
            view = await frontend.view()
            assert [(n.name, n.state) for n in view.nodes] == [
                ("attention-0", "ready"),
                ("expert-0", "ready"),
            ]
            assert await controller.drain(SECONDS)
            frontend.close()
            with pytest.raises(OverloadedError, match="stopping"):
                await answer(frontend, ask(1))
        assert attention.heard[-1] == Shutdown() == expert.heard[-1]
        assert attention.raised is None is expert.raised

    asyncio.run(scenario())


def test_a_refusal_reaches_its_request_only_and_leaving_cancels():
    async def scenario():
        async with serving() as (controller, frontend, (attention, _)):
            await ready(controller, frontend)
            with pytest.raises(OverloadedError, match="full") as refused:
                await answer(frontend, ask(1, max_tokens=99))
            assert refused.value.retry_after == 2.0
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(answer(frontend, ask(1, max_tokens=98)), 0.2)
            assert await answer(frontend, ask(5)) == [5]
            assert Cancel(2) in [value.value for value in attention.heard if isinstance(value, FromGateway)]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"token": "wrong"}, AuthError, "token"),
        ({"version": "0.0.1"}, RendezvousError, "version: the node has 0.0.1"),
    ],
)
def test_strangers_are_refused_and_the_run_goes_on(changes, kind, said):
    async def scenario():
        async with serving() as (controller, frontend, nodes):
            await ready(controller, frontend)
            stranger = ScriptedNode(nodes[0].address, **changes)
            stranger.start()
            await asyncio.to_thread(stranger.join, SECONDS)
            assert isinstance(stranger.raised, kind) and said in str(stranger.raised)
            assert await answer(frontend, ask(5)) == [5]

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_node_that_cannot_be_told_what_it_is_hears_why(monkeypatch, caplog):
    """It would join again for ever: whoever waits for it would never know."""

    def fails(value, last):
        raise KeyError("draft")

    async def scenario():
        with monkeypatch.context() as patch:
            patch.setattr(messages, "encode_to_node", fails)
            async with serving(roles=("expert",)) as (controller, _, nodes):
                await asyncio.to_thread(nodes[0].join, SECONDS)
                said = await asyncio.wait_for(controller.wait_failure(), SECONDS)
        assert isinstance(nodes[0].raised, RendezvousError) and isinstance(said, PeerLost)
        for told in (nodes[0].raised, said):
            assert "KeyError: 'draft'; this is a fault of afserve" in str(told)

    asyncio.run(scenario())
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"expert": {"agreed": {"hidden": "8"}}}, RendezvousError, "disagrees with .* on hidden"),
        (
            {"expert": {"fail": CheckpointError("shard 3 is short")}},
            CheckpointError,
            "expert-0: shard 3 is short",
        ),
        ({"expert": {"fail": DeadlineError("stuck")}}, PeerLost, "expert-0: stuck"),
        (
            {
                "expert": {"things": {"tokenizer.json": "aa"}},
                "attention": {"things": {"tokenizer.json": "bb"}},
            },
            RendezvousError,
            "disagrees with .* on tokenizer.json",
        ),
        (
            {"expert": {"things": {"expert weights": "aa"}}},
            RendezvousError,
            "attention-0 is ready, but has not said",
        ),
    ],
)
def test_a_failed_start_says_who_and_why(changes, kind, said, monkeypatch):
    monkeypatch.setattr(
        "afserve.control.node.stream.CONNECT_SECONDS", 5.0
    )  # of a node that comes when all is over

    async def scenario():
        async with serving(rules=SOON, **changes) as (controller, _, _nodes):
            with pytest.raises(kind, match=said):
                await asyncio.wait_for(controller.wait_ready(), SECONDS)

    asyncio.run(scenario())


SOON = Rules(report=0.1)  # a broken stream waits hardly for a reason
OWN = {"attention weights": "aa", "expert weights": "bb"}
AGREEING = {
    "attention": {"things": {"attention weights": "aa"}},
    "expert": {"things": {"expert weights": "bb"}},
}


def own_copy(asked):
    """The controller's own copy, read when the test says so: `asked` is [(all bytes, progress, future), ...]."""

    def read(full, progress):
        asked.append((full, progress, Future()))
        return asked[-1][2]

    return read


def test_nobody_is_ready_before_the_own_copy_has_been_compared():
    async def scenario():
        async with serving(own=own_copy, **AGREEING) as (controller, frontend, nodes):
            while not controller.members.all_ready():
                await asyncio.sleep(0.01)
            assert not controller.ready and not frontend.ready()
            ((full, _, found),) = nodes.asked
            assert not full
            found.set_result(OWN)
            await ready(controller, frontend)
            assert await answer(frontend, ask(5)) == [5]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("found", "kind", "said"),
    [
        (
            {**OWN, "expert weights": "cc"},
            RendezvousError,
            "expert-0 disagrees with the controller on expert weights: bb",
        ),
        (CheckpointError("shard 3 is short"), CheckpointError, "shard 3 is short"),
    ],
)
def test_an_own_copy_that_is_another_one_ends_the_start(found, kind, said):
    async def scenario():
        async with serving(own=own_copy, **AGREEING) as (controller, _, nodes):
            while not controller.members.all_ready():
                await asyncio.sleep(0.01)
            future = nodes.asked[0][2]
            future.set_exception(found) if isinstance(found, Exception) else future.set_result(found)
            with pytest.raises(kind, match=said):
                await asyncio.wait_for(controller.wait_ready(), SECONDS)

    asyncio.run(scenario())


def test_a_node_that_gives_all_bytes_has_them_compared():
    told = {"things": {"expert weights": "bb", "expert weights (all bytes)": "dd"}}

    async def scenario():
        async with serving(own=own_copy, attention=AGREEING["attention"], expert=told) as (
            controller,
            _,
            nodes,
        ):
            while not controller.members.all_ready():
                await asyncio.sleep(0.01)
            samples, everything = nodes.asked
            assert (samples[0], everything[0]) == (False, True)
            samples[2].set_result(OWN)
            await asyncio.sleep(0.05)
            assert not controller.ready
            everything[2].set_result({**OWN, "expert weights (all bytes)": "ee"})
            with pytest.raises(
                RendezvousError, match=r"expert-0 .* on expert weights \(all bytes\): dd against ee"
            ):
                await asyncio.wait_for(controller.wait_ready(), SECONDS)

    asyncio.run(scenario())


def test_an_own_copy_that_does_not_answer_is_named():
    async def scenario():
        clock = FakeClock()
        async with serving(own=own_copy, clock=clock, **AGREEING) as (controller, _, nodes):
            while not controller.members.all_ready():
                await asyncio.sleep(0.01)
            clock.advance(identifying.STALL_SECONDS - 1)
            for member in controller.members:
                member.seen_at = clock.now()
            nodes.asked[0][1](0.5)  # something was read
            clock.advance(identifying.STALL_SECONDS + 1)
            for member in controller.members:
                member.seen_at = clock.now()
            failure = await asyncio.wait_for(controller.wait_failure(), SECONDS)
            assert "own copy of the checkpoint was not read within 600 s" in failure.message

    asyncio.run(scenario())


def test_a_lost_node_answers_every_open_request():

    async def scenario():
        async with serving(rules=SOON) as (controller, frontend, (_, expert)):
            await ready(controller, frontend)
            open_one = asyncio.create_task(answer(frontend, ask(1, max_tokens=98)))
            await asyncio.sleep(0)
            expert.leave.set()
            with pytest.raises(PeerLost, match="expert-0: its control stream ended"):
                await asyncio.wait_for(open_one, SECONDS)
            failure = await asyncio.wait_for(controller.wait_failure(), SECONDS)
            assert isinstance(failure, PeerLost)
            with pytest.raises(PeerLost):
                await answer(frontend, ask(1))
            assert not frontend.ready()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_stream_that_breaks_is_opened_again_and_a_request_that_was_lost_with_it_is_sent_again():
    async def scenario():
        async with serving() as (controller, frontend, (attention, _)):
            await ready(controller, frontend)
            open_one = asyncio.create_task(answer(frontend, ask(1, 2, max_tokens=98)))
            while not (first := submitted(attention)):
                await asyncio.sleep(0.01)
            attention.gateways._streams[0][1].drop()
            while len(again := submitted(attention)) < 2:
                await asyncio.sleep(0.01)
            assert again[0] == first[0] and again[1].handle != first[0].handle
            assert again[1].prompt_ids == (1, 2) and frontend.ready()
            assert (await frontend.view()).moved == {"stream": 1}
            attention.answer(replace(again[1], params=SamplingParams()))
            assert await asyncio.wait_for(open_one, SECONDS) == [1, 2]
            assert await answer(frontend, ask(5)) == [5]

    asyncio.run(scenario())


def submitted(node):
    return [
        value.value.request
        for value in node.heard
        if isinstance(value, FromGateway) and isinstance(value.value, Submit)
    ]


def test_an_earlier_life_is_not_let_in():
    async def scenario():
        async with serving() as (controller, frontend, nodes):
            await ready(controller, frontend)
            ended = threading.Event()
            old = Stream(nodes[0].address, TOKEN, ATTEND, print, lambda error: ended.set())
            frontend._gateway.update_nodes(
                AttentionNodes((AttentionPeer(attention_life(0, 3), accepting=True),))
            )
            old.send(Attend(attention_life(0, 2)))
            old.start()
            assert await asyncio.to_thread(ended.wait, SECONDS)
            old.close()

    asyncio.run(scenario())


def test_new_requests_are_refused_with_the_reason_and_running_ones_go_on():
    async def scenario():
        async with serving() as (controller, frontend, (attention, _)):
            await ready(controller, frontend)
            open_one = asyncio.create_task(answer(frontend, ask(1, 2, max_tokens=98)))
            while not submitted(attention):
                await asyncio.sleep(0.01)
            there = AttentionNodes(
                (AttentionPeer(attention_life(0, 0), accepting=True),), "layer 3 has no expert 7"
            )
            frontend._gateway.update_nodes(there)
            with pytest.raises(UnavailableError, match="layer 3 has no expert 7") as refused:
                await answer(frontend, ask(1))
            assert (refused.value.status, refused.value.retry_after) == (503, 2.0) and not frontend.ready()
            attention.answer(replace(submitted(attention)[0], params=SamplingParams()))
            assert await asyncio.wait_for(open_one, SECONDS) == [1, 2]
            frontend._gateway.update_nodes(replace(there, refusing=""))
            assert frontend.ready() and await answer(frontend, ask(5)) == [5]

    asyncio.run(scenario())


def test_the_parents_report_comes_before_the_broken_stream():
    async def scenario():
        async with serving() as (controller, _, (_, expert)):
            await asyncio.wait_for(controller.wait_ready(), SECONDS)
            expert.leave.set()
            controller.report_exit(expert_node(0), "its process was killed by SIGKILL")
            failure = await asyncio.wait_for(controller.wait_failure(), SECONDS)
            assert failure.message == "expert-0: its process was killed by SIGKILL"

    asyncio.run(scenario())


def test_the_cause_is_named_not_the_one_who_noticed_first():
    gone = PeerLost("expert-0", "its process 7 has ended")

    async def scenario():
        async with serving(attention={"fail": gone}) as (controller, _, _nodes):
            while not controller.membership._recovery._accusers:
                await asyncio.sleep(0.01)
            controller.report_exit(attention_node(0), "its process ended with exit code 1")
            controller.report_exit(expert_node(0), "its process was killed by SIGKILL")
            failure = await asyncio.wait_for(controller.wait_failure(), SECONDS)
            assert failure.message == "expert-0: its process was killed by SIGKILL"

    asyncio.run(scenario())


def test_a_node_that_never_comes_is_named():
    async def scenario():
        clock = FakeClock()
        async with serving(clock=clock, roles=("attention",)) as (controller, _, (attention,)):
            while not attention.heard:
                await asyncio.sleep(0.01)
            clock.advance(recovery.REGISTER_SECONDS + 1)
            with pytest.raises(DeadlineError, match="expert-0 never registered"):
                await asyncio.wait_for(controller.wait_ready(), SECONDS)

    asyncio.run(scenario())


def test_a_silent_node_is_named():
    async def scenario():
        clock = FakeClock()
        async with serving(clock=clock) as (controller, _, _nodes):
            await asyncio.wait_for(controller.wait_ready(), SECONDS)
            clock.advance(recovery.PATIENCE_SECONDS + 1)
            failure = await asyncio.wait_for(controller.wait_failure(), SECONDS)
            assert "attention-0: silent for 16.0 s" in failure.message

    asyncio.run(scenario())


@pytest.mark.slow
def test_nobody_there_is_said(monkeypatch):
    monkeypatch.setattr("afserve.control.node.stream.CONNECT_SECONDS", 0.3)
    with pytest.raises(DeadlineError, match=r"no controller at 127\.0\.0\.1:9"):
        ControlStream("127.0.0.1:9", TOKEN).start()


def test_a_bug_in_the_watch_ends_the_run(monkeypatch, caplog):
    def broken(self, awaited, now):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(Losses, "check_time", broken)

    async def scenario():
        async with serving() as (controller, _, _nodes):
            failure = await asyncio.wait_for(controller.wait_failure(), SECONDS)
            assert failure.message == "the controller failed; its log says why"

    asyncio.run(scenario())
    assert "ZeroDivisionError: oops" in caplog.text


@pytest.mark.slow
def test_nodes_go_on_without_a_controller_and_the_next_one_learns_from_them_who_they_are():
    async def scenario():
        with keep_port("127.0.0.1", 0) as kept:
            port = kept.getsockname()[1]
            first = Controller(RUN, TOKEN, MonotonicClock(), rules=RECOVER)
            address = await first.start(port=port, shares_port=True)
            nodes = [ScriptedNode(address, role) for role in ("attention", "expert")]
            for node in nodes:
                node.start()
            await asyncio.wait_for(first.wait_ready(), SECONDS)
            known = {member.id for member in first.members}
            assert first._streams._server is not None
            await first._streams._server.stop(0)  # as a killed process: nobody is told to go
            gateway = Gateway(TOKEN, generation=256)
            wiring = Wiring(tell_attention=gateway.update_nodes)
            second = Controller(RUN, TOKEN, MonotonicClock(), rules=RECOVER, wiring=wiring, life=1)
            await second.start(port=port, also=[gateway.handler], shares_port=True)
            await asyncio.wait_for(second.wait_ready(), SECONDS)
            assert {member.id for member in second.members} == known
            assert all(member.state is State.READY for member in second.members)
            await asyncio.wait_for(gateway.wait_attended(), SECONDS)
            late = ScriptedNode(address, "expert")
            late.start()
            await asyncio.to_thread(late.join, SECONDS)
            assert "taken" in str(late.raised)
            gateway.stop()
            await second.stop()
            await first.stop()
            for node in nodes:
                await asyncio.to_thread(node.join, SECONDS)
                assert node.raised is None

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_node_ends_when_no_controller_comes_within_the_grace():
    engine = EngineConfig(64, 9, orphan_grace=0.2)

    async def scenario():
        controller = Controller(replace(RUN, engine=engine), TOKEN, MonotonicClock(), rules=RECOVER)
        address = await controller.start()
        nodes = [ScriptedNode(address, role) for role in ("attention", "expert")]
        for node in nodes:
            node.start()
        await asyncio.wait_for(controller.wait_ready(), SECONDS)
        assert controller._streams._server is not None
        await controller._streams._server.stop(0)
        for node in nodes:
            await asyncio.to_thread(node.join, SECONDS)
            assert isinstance(node.raised, PeerLost) and "stream broke" in node.raised.message
        await controller.stop()

    asyncio.run(scenario())


def test_a_placement_that_was_thought_out_for_a_node_that_has_gone_is_dropped(monkeypatch, caplog):
    async def script():
        controller = Controller(RUN, TOKEN, FakeClock(), rules=RECOVER)
        late = Place(Placement.contiguous(layers=1, experts=2, nodes=2, epoch=3))
        monkeypatch.setattr(controller.balancing, "age", lambda now: object())
        monkeypatch.setattr(controller.balancing, "think", lambda stats, now: None)
        monkeypatch.setattr(controller.balancing, "decided", lambda decision: late)
        with caplog.at_level("INFO", logger="afserve.control"):
            await controller.rebalancing.rebalance(0.0)
        controller.check()
        assert "the experts stay where they are" in caplog.text

    asyncio.run(script())
