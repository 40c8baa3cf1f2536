"""The loops of the two node processes, over a scripted stream and a scripted engine: no process, no gRPC."""

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from afserve.clock import FakeClock
from afserve.control.node.attention import AttentionLoop
from afserve.control.node.expert import ExpertLoop
from afserve.control.node.gateways import FromGateway
from afserve.control.node.journal import Journal
from afserve.control.node.kept import KeptRequest, KeptRequests
from afserve.control.node.peers import ExpertPeers
from afserve.control.node.stream import ControlStream
from afserve.control.wire.placement_values import Filled, FillSlots, Unfilled
from afserve.control.wire.request_values import (
    Acknowledge,
    Cancel,
    Held,
    Refused,
    Resume,
    Submit,
    Tokens,
    first_request,
)
from afserve.control.wire.values import (
    AttentionNodes,
    AttentionPeer,
    Drain,
    Drained,
    Gateways,
    Peers,
    Serve,
    Shutdown,
    ToNode,
)
from afserve.engine.filler import Filler
from afserve.engine.scheduling.request import (
    AHEAD_PRIORITY,
    GenerationRequest,
    Origin,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from afserve.errors import (
    CheckpointError,
    OverloadedError,
    PeerError,
    PeerLost,
    ProtocolError,
    RendezvousError,
)
from afserve.member import attention_life, attention_node
from afserve.placement.placement import LayerPlacement, Placement
from afserve.tracing.trace import Trace
from tests.engine.scripted_kv import NoKv

GRACE = 5.0


class ScriptedStream(ControlStream):
    """Each `receive` gives the next batch of commands; the end of the script is a broken stream."""

    def __init__(self, *batches):
        super().__init__("127.0.0.1:9", "token")
        self.script = deque(batches)
        self.sent, self.waits = [], []

    def receive(self, timeout):
        self.waits.append(timeout)
        if not self.script:
            raise PeerLost("controller", "ended the stream")
        return self.script.popleft()

    def send(self, value):
        self.sent.append(value)


class ScriptedGateways:
    """Says what was sent to which gateway, and takes no other life of a stream than the first."""

    waiting = False

    def __init__(self):
        self.sent, self.lives = [], {}

    def update(self, value):
        left = [gateway for gateway in self.lives if gateway not in dict(value.gateways)]
        self.lives = {gateway: 1 for gateway, _ in value.gateways}
        return left

    def is_of_now(self, value):
        return value.life == self.lives.get(value.gateway, 1)

    def lost(self, gateway):
        self.lives[gateway] = 2

    def redial(self):
        pass

    def send(self, gateway, value):
        self.sent.append((gateway, value))

    def said(self, kind):
        return [value for _, value in self.sent if isinstance(value, kind)]


class ScriptedExperts(ExpertPeers):
    def __init__(self):
        super().__init__(cast(Any, SimpleNamespace()), Peers(()), GRACE, print, print, FakeClock())

    def look(self):
        pass

    def update(self, peers):
        self.peers = peers


class ScriptedNode:
    """Gives each request two tokens, one per step; every second step finds nothing to do."""

    held = under_way = False
    rests = 0.0

    def note_line(self, waiting, *, moving):
        self.line = waiting

    def __init__(self):
        self.left, self.cancelled, self.waited, self.stalled, self.turn = {}, [], 0, False, 0

    @property
    def busy(self):
        return bool(self.left)

    def submit(self, request):
        if request.params.max_tokens == 99:
            raise OverloadedError("full")
        self.left[request.handle] = 2

    def cancel(self, handle):
        self.cancelled.append(handle)
        self.left.pop(handle, None)

    def step(self):
        self.turn += 1
        self.stalled = self.turn % 2 == 0
        if self.stalled:
            return []
        events = []
        for handle in list(self.left):
            self.left[handle] -= 1
            done = self.left[handle] == 0
            events.append(TokenEvent(handle, (7,), "length" if done else None))
            if done:
                del self.left[handle]
        return events

    def wait(self, timeout):
        self.waited += 1


def loop(node, stream, gateways, clock=None, kv=None, **parts):
    clock = clock or FakeClock()
    kept = KeptRequests(GRACE, clock)
    return AttentionLoop(node, stream, gateways, ScriptedExperts(), kept, kv or NoKv(), clock=clock, **parts)


def submit(number, **params):
    return said(Submit(GenerationRequest(number, (1, 2), SamplingParams(**params))))


def said(value, gateway=0, life=1):
    return FromGateway(gateway, life, value)


def test_all_tokens_of_a_step_travel_in_one_message():
    stream, node = ScriptedStream([submit(1), submit(2)], [], [], [], [Shutdown()]), ScriptedNode()
    gateways = ScriptedGateways()
    loop(node, stream, gateways).run()
    steps = gateways.said(Tokens)
    assert [[event.handle for event in step.events] for step in steps] == [[1, 2], [1, 2]]


class QuickNode(ScriptedNode):
    """One token per step, never stalled."""

    def submit(self, request):
        self.left[request.handle] = request.params.max_tokens

    def step(self):
        self.turn = 0
        return super().step()


def test_tokens_of_short_steps_travel_together_and_none_stays_behind():
    clock = FakeClock(100.0)

    class Later(ScriptedStream):
        def receive(self, timeout):
            clock.advance(0.0015)
            return super().receive(timeout)

    stream = Later([submit(1, max_tokens=6)], *[[]] * 6, [Shutdown()])
    gateways = ScriptedGateways()
    loop(QuickNode(), stream, gateways, clock).run()
    steps = [len(value.events) for value in gateways.said(Tokens)]
    assert steps == [1, 3, 2], "the first at once, then what 4 ms gathered, and the end at the end"


def test_a_cancelled_request_leaves_no_token_of_others_behind():
    stream = ScriptedStream([submit(1, max_tokens=9)], [], [said(Cancel(1))], [Shutdown()])
    gateways = ScriptedGateways()
    loop(QuickNode(), stream, gateways, FakeClock(100.0)).run()
    assert [len(value.events) for value in gateways.said(Tokens)] == [1, 1]


def test_parks_on_the_link_when_stalled_and_on_the_stream_when_idle():
    stream, node = ScriptedStream([], [submit(1)], [], [], [], [Shutdown()]), ScriptedNode()
    loop(node, stream, ScriptedGateways()).run()
    assert node.waited == 1
    assert stream.waits[0] > 0 and stream.waits[2] == 0.0 and stream.waits[-1] > 0


def test_what_nobody_waits_for_begins_when_there_is_nothing_else():
    """Its blocks are looked for only then; who was cancelled meanwhile never begins."""

    class Asked(NoKv):
        def __init__(self):
            self.looked = []

        def restore(self, request):
            self.looked.append((request.handle, node.busy))
            return False

    def ahead(number):
        asked = GenerationRequest(number, (1, 2), SamplingParams(max_tokens=1), priority=AHEAD_PRIORITY)
        return said(Submit(asked))

    node, kv = ScriptedNode(), Asked()
    first = [ahead(2), submit(1), ahead(3), ahead(4), said(Cancel(3))]
    stream = ScriptedStream(first, *[[]] * 12, [Shutdown()])
    gateways = ScriptedGateways()
    loop(node, stream, gateways, kv=kv).run()
    assert kv.looked == [(1, False), (2, False), (4, False)]
    ends = [event.handle for said in gateways.said(Tokens) for event in said.events if event.finish_reason]
    assert ends == [1, 2, 4] and max(stream.waits[1:6]) == 0.0, "it did not sleep over it"


def test_the_end_of_an_answer_is_told_before_a_node_rests():
    """Tokens of short steps are gathered; what is computed ahead keeps the node busy, and it does not step."""
    clock, node = FakeClock(100.0), QuickNode()

    class Script(ScriptedStream):
        def receive(self, timeout):
            if len(self.waits) == 3:
                node.rests = 0.1
                assert sum(len(value.events) for value in gateways.said(Tokens)) == 1, "two are gathered"
            if len(self.waits) == 4:
                assert sum(len(value.events) for value in gateways.said(Tokens)) == 3
            return super().receive(timeout)

    stream, gateways = Script([submit(1, max_tokens=6)], [], [], [], [], [Shutdown()]), ScriptedGateways()
    loop(node, stream, gateways, clock).run()


def test_a_node_that_rests_sleeps_until_somebody_comes_or_it_is_over():
    class Resting(ScriptedNode):
        rests = 0.06

        def step(self):
            assert not self.rests, "it rests"
            return super().step()

    node = Resting()

    class Script(ScriptedStream):
        def receive(self, timeout):
            if len(self.waits) == 4:
                node.rests = 0.0
            return super().receive(timeout)

    stream = Script([submit(1)], [], [], [], [], [], [], [Shutdown()])
    loop(node, stream, ScriptedGateways()).run()
    assert stream.waits[1:4] == [0.06] * 3 and stream.waits[5] == 0.0
    assert not node.busy


class Lending(NoKv):
    """Blocks are to be copied for another node; `said` tells in which order things happen."""

    busy, eager = True, False

    def __init__(self, said):
        self.said = said

    def turn(self):
        self.said.append("copied")
        self.eager = False
        return []


class Stepping(ScriptedNode):
    """A step has two parts, with a wait between them."""

    def __init__(self, said):
        super().__init__()
        self.said, self.under_way = said, False

    def step(self):
        self.stalled = self.under_way and not self.waited
        if self.stalled:
            return []
        self.under_way = not self.under_way
        self.said.append("sent" if self.under_way else "ended")
        self.waited = 0
        return []


def test_rows_of_the_next_step_leave_before_blocks_of_the_last_one_are_copied():
    said: list[str] = []
    node = Stepping(said)
    loop(
        node, ScriptedStream([submit(1)], *[[]] * 4, [Shutdown()]), ScriptedGateways(), kv=Lending(said)
    ).run()
    begun = said[said.index("ended") :]
    assert begun[:5] == ["ended", "sent", "copied", "ended", "sent"]


def test_a_node_that_waits_for_anothers_part_of_a_prompt_sleeps_until_something_comes():
    node, kv = ScriptedNode(), Lending([])
    stream = ScriptedStream([submit(1)], [], [], [Shutdown()])
    loop(node, stream, ScriptedGateways(), kv=kv).run()
    assert stream.waits[1] == 0.0, "it steps"
    node, stream = ScriptedNode(), ScriptedStream([submit(1)], [], [], [Shutdown()])
    node.held = True
    loop(node, stream, ScriptedGateways(), kv=kv).run()
    assert stream.waits[1] > 0.0


def test_the_last_blocks_of_a_prompt_leave_before_anything_else():
    said: list[str] = []
    kv = Lending(said)

    class Noted(ScriptedStream):
        def receive(self, timeout):
            said.append("received")
            return super().receive(timeout)

    def report(**how):
        said.append("reported")

    kv.eager = True
    loop(ScriptedNode(), Noted([], [Shutdown()]), ScriptedGateways(), kv=kv, report=report).run()
    assert said[:3] == ["copied", "reported", "received"]


def test_a_refusal_names_the_request_and_harms_no_other():
    stream, node = ScriptedStream([submit(1), submit(2, max_tokens=99)], [], [], [Shutdown()]), ScriptedNode()
    gateways = ScriptedGateways()
    loop(node, stream, gateways).run()
    refused = gateways.said(Refused)
    assert [(value.request, type(value.error)) for value in refused] == [(2, OverloadedError)]
    assert gateways.said(Tokens)


def test_cancel_then_drain():
    stream = ScriptedStream(
        [submit(1)],
        [submit(2)],
        [said(Cancel(1)), Drain()],
        *[[]] * 4,
        [said(Acknowledge((2,)))],
        [],
        [Shutdown()],
    )
    node = ScriptedNode()
    loop(node, stream, ScriptedGateways()).run()
    assert node.cancelled == [1]
    assert stream.sent.count(Drained()) == 1
    assert isinstance(stream.sent[-1], Drained)


def test_a_broken_stream_ends_the_loop():
    with pytest.raises(PeerLost, match="controller"):
        loop(ScriptedNode(), ScriptedStream([submit(1)], []), ScriptedGateways()).run()


def test_a_command_out_of_place_is_refused():
    with pytest.raises(ProtocolError, match="Serve"):
        loop(ScriptedNode(), ScriptedStream([Serve()]), ScriptedGateways()).run()


def test_each_gateway_gets_its_own_requests_tokens():
    first, second = first_request(0), first_request(1)
    stream = ScriptedStream([submit(first), said(submit(second).value, 1)], [], [], [], [Shutdown()])
    gateways = ScriptedGateways()
    loop(ScriptedNode(), stream, gateways).run()
    to = {gateway: [e.handle for e in value.events] for gateway, value in gateways.sent}
    assert to == {0: [first], 1: [second]}


def after(clock, seconds, *commands):
    """A batch that arrives when so much time has passed."""

    class Late(list):
        def __iter__(self):
            clock.advance(seconds)
            return super().__iter__()

    return Late(commands)


def test_a_gateway_that_stays_away_takes_its_requests_along_and_no_others():
    first, second = first_request(0), first_request(1)
    clock = FakeClock()
    stream = ScriptedStream(
        [submit(first, max_tokens=9), said(submit(second, max_tokens=9).value, 1)],
        [said(None, 1)],
        after(clock, GRACE - 0.1, said(submit(7).value, 1)),
        after(clock, 0.2),
        [Shutdown()],
    )
    node, gateways = QuickNode(), ScriptedGateways()
    loop(node, stream, gateways, clock).run()
    assert node.cancelled == [second]
    assert 7 not in node.left, "an earlier stream's request was taken"
    assert first in node.left


def test_a_gateway_that_the_controller_names_no_more_is_left():
    clock = FakeClock()
    one = first_request(1)
    stream = ScriptedStream(
        [Gateways(((0, ""), (1, "a")))],
        [said(Submit(GenerationRequest(one, (1,), SamplingParams(max_tokens=9))), 1)],
        [Gateways(((0, ""),))],
        after(clock, GRACE + 0.1),
        [Shutdown()],
    )
    node = QuickNode()
    loop(node, stream, ScriptedGateways(), clock).run()
    assert node.cancelled == [one]


def test_a_gateway_that_is_back_is_told_what_it_missed_and_each_token_once():
    gateways = ScriptedGateways()
    stream = ScriptedStream(
        [submit(1, max_tokens=6)],
        [],
        [said(None)],
        [],
        [said(Resume(1, 1), life=2)],
        [],
        [Shutdown()],
    )
    one = loop(QuickNode(), stream, gateways)
    one.run()
    told = [event for value in gateways.said(Tokens) for event in value.events]
    assert [len(event.token_ids) for event in told] == [1, 3, 1, 1], "one before, three missed, and each step"
    assert told[-1].finish_reason == "length"
    assert one._kept.held(0) == (Held(1, 6),), "kept until its end is acknowledged"


def test_what_is_not_held_cannot_be_gone_on_with():
    gateways = ScriptedGateways()
    stream = ScriptedStream([said(Resume(4, 0))], [submit(1)], [said(Resume(1, 9))], [Shutdown()])
    loop(ScriptedNode(), stream, gateways).run()
    assert [(value.request, type(value.error)) for value in gateways.said(Refused)] == [
        (4, PeerError),
        (1, PeerError),
    ]


def test_a_refusal_is_said_again_to_a_gateway_that_is_back():
    gateways = ScriptedGateways()
    stream = ScriptedStream(
        [submit(2, max_tokens=99)], [said(None)], [said(Resume(2, 0), life=2)], [Shutdown()]
    )
    loop(ScriptedNode(), stream, gateways).run()
    assert [value.request for value in gateways.said(Refused)] == [2, 2]


def test_an_answer_that_began_elsewhere_is_counted_from_its_beginning():
    journal = Journal()
    kept = KeptRequest(1, 0, journal.begin(Origin(), 2), base=3)
    assert kept.since(3) is None
    logprobs = tuple(TokenLogprob(token, -1.0, 1) for token in (5, 6))
    kept.add(TokenEvent(1, (5, 6), logprobs=logprobs, cached_tokens=4), journal)
    kept.add(TokenEvent(1, (), "error", error="spoiled"), journal)
    assert kept.count == 5
    assert kept.since(3) == TokenEvent(1, (5, 6), "error", None, logprobs, (), 4, "spoiled")
    assert kept.since(4) == TokenEvent(1, (6,), "error", None, logprobs[1:], (), 0, "spoiled")
    assert kept.since(5) == TokenEvent(1, (), "error", error="spoiled")


def test_drained_is_said_when_the_last_end_has_been_acknowledged():
    quiet: list[list[ToNode]] = [[] for _ in range(8)]
    for late in ([], [said(Acknowledge((1,)))]):
        stream = ScriptedStream([submit(1), Drain()], *quiet, late, [], [Shutdown()])
        loop(ScriptedNode(), stream, ScriptedGateways()).run()
        assert stream.sent.count(Drained()) == bool(late)


def test_one_that_leaves_hands_on_its_kv_before_it_says_so_and_the_end_of_a_run_does_not():
    class Kv(NoKv):
        def __init__(self):
            self.asked = []

        def hands_on(self, peers):
            self.asked.append([peer.address for peer in peers])
            return len(self.asked) < 3

    told = AttentionNodes(
        tuple(AttentionPeer(attention_life(n, 0), n != 2, f"unix:{n}") for n in range(1, 4))
    )
    for ends, asked in ((False, 3 * [["unix:1", "unix:3"]]), (True, [])):
        kv, stream = Kv(), ScriptedStream([told, Drain(ends)], [], [], [], [Shutdown()])
        loop(ScriptedNode(), stream, ScriptedGateways(), kv=kv).run()
        assert kv.asked == asked and stream.sent.count(Drained()) == 1


class ScriptedBank:
    """An engine that computes nothing; at every look at rows a fill is tried."""

    trace: Trace | None = None
    expert_bytes = 1

    def __init__(self):
        self.unreadable, self.accepted, self.filler = {2}, [], Filler(self)

    def fill(self, layer, slot, expert):
        if expert in self.unreadable:
            raise CheckpointError("model.safetensors: cannot be read: Input/output error")

    def drawn_open(self):
        return []

    def poll(self):
        self.filler.work()
        return 1

    def wait(self, timeout):
        raise AssertionError("there is always something")

    def accept(self, epoch):
        self.accepted.append(epoch)

    def retire(self, epoch):
        pass

    def in_phases(self, phases):
        pass


class ScriptedExpert(ScriptedBank):
    """At every second look there are rows. A wait finds none, or that an attention node is lost."""

    def __init__(self, lost=False):
        super().__init__()
        self.polls, self.waits, self.lost = 0, 0, lost

    def poll(self):
        self.polls += 1
        return self.polls % 2

    def wait(self, timeout):
        self.waits += 1
        if self.lost:
            raise PeerLost(attention_node(0), "gone")


@pytest.mark.parametrize(("lost", "polls", "waits"), [(False, 7, 3), (True, 4, 2)])
def test_expert_serves_until_told_to_stop(lost, polls, waits):
    """What a wait has found is computed before the loop looks at commands."""
    node, stream = ScriptedExpert(lost), ScriptedStream([], [], [], [Drain()], [Shutdown()])
    ExpertLoop(
        cast(Any, node), node.filler, Placement.contiguous(layers=1, experts=2, nodes=1), 0, stream
    ).run()
    assert (node.polls, node.waits) == (polls, waits)
    assert stream.sent == [Drained()]


def test_nobody_loads_for_a_controller_that_is_gone():
    stream = ControlStream("127.0.0.1:9", "token")
    report = stream.progress("weights")
    report(0.5)
    stream._end(RendezvousError("expert-0 disagrees with the controller on expert weights"))
    with pytest.raises(RendezvousError, match="expert weights"):
        report(0.5)


class Place:
    """Where a stream may sleep: a test says what happens there."""

    def __init__(self, then=lambda: None) -> None:
        self.then, self.slept, self.rung = then, 0, 0

    def sleep(self, seconds):
        self.slept += 1
        self.then()

    def ring(self):
        self.rung += 1


def test_a_node_sleeps_where_it_is_told_and_what_is_delivered_rings_only_then():
    stream = ControlStream("127.0.0.1:9", "token")
    place = Place(lambda: stream.deliver("late"))
    stream.sleep_in(place)
    stream.deliver("early")
    assert (stream.receive(5.0), place.slept, place.rung) == (["early"], 0, 0)
    assert (stream.receive(5.0), place.slept, place.rung) == (["late"], 1, 1)
    place.then = lambda: None
    assert (stream.receive(5.0), place.slept, place.rung) == ([], 2, 1)
    place.then = lambda: stream._end(PeerLost("controller", "ended the stream"))
    with pytest.raises(PeerLost):
        stream.receive(5.0)
    assert place.rung == 2


def test_an_expert_node_that_cannot_read_says_so_and_goes_on():
    """The epoch is given up here; the next one is filled anew, with all that is not known to be held."""
    before = Placement.contiguous(layers=1, experts=2, nodes=1, slots_per_node=4)
    rows = ((0, 1, 3, 2),)
    wider = Placement(1, 1, 4, (LayerPlacement(rows, ((1.0,) * 4,)),))
    experts = ScriptedBank()
    idle: list[list[ToNode]] = [[] for _ in range(4)]
    stream = ScriptedStream([FillSlots(wider)], *idle, [FillSlots(wider.with_epoch(2))], *idle, [Shutdown()])
    loop = ExpertLoop(cast(Any, experts), experts.filler, before, 0, stream)
    while len(stream.script) > 6:
        loop.turn()
    assert stream.sent == [Unfilled(1, ((0, 2),), "model.safetensors: cannot be read: Input/output error")]
    experts.unreadable.clear()
    loop.run()
    assert [type(said) for said in stream.sent] == [Unfilled, Filled] and experts.accepted == [2]
    assert (stream.sent[1].epoch, stream.sent[1].experts) == (2, 1), "what was read is not read again"
