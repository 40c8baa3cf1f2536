"""A node records for as long as it is asked to and no longer; the controller asks some and waits for none for long."""

import asyncio

import pytest

from afserve.clock import FakeClock
from afserve.control import recordings
from afserve.control.node.recording import Recorder
from afserve.control.recordings import MOST_NODES, Recordings
from afserve.control.wire.values import Record, Recorded
from afserve.member import Life, attention_node, expert_node
from afserve.tracing.recording import MOST_BYTES, MOST_SLICES, Recording
from afserve.tracing.trace import Trace


class Node:
    def __init__(self, trace=None):
        self.trace = trace

    def drawn_open(self):
        return [("micro-batch 0, with the experts", "layer 1", 0.2, 0.4, {"layer": 1})]


@pytest.fixture(params=["draws for nobody", "draws a trace of the run"])
def node(request):
    return Node(Trace("n") if request.param == "draws a trace of the run" else None)


def test_a_moment_is_recorded_and_told_once(node):
    sent: list[Recorded] = []
    clock, lasting = FakeClock(), node.trace
    recorder = Recorder(node, "expert-1", sent.append, clock)
    if lasting is not None:
        lasting.slice("experts", "before", 0.0, 0.1)
    recorder.look()
    assert not recorder.active and node.trace is lasting
    began = clock.now()
    recorder.begin(Record(7, 0.25))
    node.trace.slice("experts", "within", 0.2, 0.3, {"layer": 2})
    clock.advance(0.1)
    recorder.look()
    assert recorder.active and not sent
    clock.advance(0.2)
    recorder.look()
    recorder.look()
    assert not recorder.active and node.trace is lasting
    (told,) = sent
    got = Recording.unpack(told.data)
    assert (told.number, got.node, got.began, got.ended) == (7, "expert-1", began, clock.now())
    assert got.slices == (("experts", "within", 0.2, 0.3, {"layer": 2}), *node.drawn_open())
    if lasting is not None:
        assert [name for _, name, *_ in lasting.slices] == ["before", "within"]


def test_a_full_recording_ends_at_once_and_another_question_begins_anew(node):
    sent: list[Recorded] = []
    recorder, lasting = Recorder(node, "attention-0", sent.append, FakeClock()), node.trace
    recorder.begin(Record(1, 9.0))
    recorder.begin(Record(2, 9.0))
    for i in range(MOST_SLICES):
        node.trace.slice("t", "x", i, i + 1.0)
    recorder.look()
    assert [told.number for told in sent] == [2] and node.trace is lasting
    assert len(Recording.unpack(sent[0].data).slices) == MOST_SLICES


def members(role, count):
    return [Life(role(index), 0) for index in range(count)]


def test_some_of_each_role_are_asked_and_all_who_ask_get_one_answer():
    serving = [*members(expert_node, MOST_NODES + 3), *members(attention_node, 2)]

    async def run():
        asked = []
        several = Recordings(lambda member, said: asked.append((member, said)))
        both = [asyncio.create_task(several.record_nodes(serving)) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [str(member) for member, _ in asked].count("attention-1") == 1
        assert len(asked) == 2 + MOST_NODES
        for index, (member, said) in enumerate(reversed(asked)):
            several.collect_part(member, Recorded(said.number - 1, b"of another question"))
            several.collect_part(member, Recorded(said.number, str(member).encode()))
            several.collect_part(member, Recorded(said.number, b"said twice"))
            assert index < len(asked)
        first, second = await asyncio.gather(*both)
        assert first == second == tuple(str(member).encode() for member, _ in asked)

    asyncio.run(run())


def test_who_does_not_answer_or_says_too_much_is_left_out(monkeypatch):
    monkeypatch.setattr(recordings, "_LATE", 0.0)
    monkeypatch.setattr(recordings, "SECONDS", 0.05)
    one, two, three = members(attention_node, 3)

    async def run():
        asked = {}
        several = Recordings(lambda member, said: asked.update({member: said}))
        taking = asyncio.create_task(several.record_nodes([one, two, three]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        several.collect_part(one, Recorded(asked[one].number, b"in time"))
        several.collect_part(two, Recorded(asked[two].number, bytes(MOST_BYTES + 1)))
        assert await taking == (b"in time",)
        several.collect_part(three, Recorded(asked[three].number, b"late"))
        assert await several.record_nodes([]) == ()

    asyncio.run(run())
