"""An expert node on a device whose calls are done later: decoding goes before prompts there, and values stay right.

The device is scripted: two queues, blocks of a known length, a clock that is moved by hand.
"""

import itertools
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afserve.clock import FakeClock
from afserve.comm.m2n import bank
from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.port import ExpertPort
from afserve.comm.transport import Box, Layout, WireType
from afserve.comm.transports import connect
from afserve.engine import device_queues
from afserve.engine.device_queues import (
    DeviceQueuePair,
    DeviceQueues,
    alone_on,
    in_queues_apart,
    queue_per_box,
    queues_of,
)
from afserve.engine.expert_node import ExpertNode
from afserve.engine.filler import Filler
from afserve.errors import CheckpointError
from afserve.kernels.devices.cuda import CudaDevice
from afserve.kernels.devices.host import HostDevice
from afserve.kernels.devices.opened import device_of
from afserve.member import AttentionPhase
from afserve.placement.placement import Fill, Placement
from bench.phases import CHUNKS, DEVICE, FAST, Case, run
from bench.scripted_device import ScriptedDevice, ScriptedStage

LAYERS, BLOCK, CALL, ROW = 4, 26e-6, 100e-6, 1e-6
WIRE = WireType.FLOAT32
LAYOUT = Layout(8, 2, 512, 2, LAYERS, 4, WIRE, WIRE)


class Bank(bank.Bank):
    """Doubles its rows."""

    def __init__(self, device):
        self.device = device

    def forward(self, layer, x_RH, slot_RK, weight_RK, out_RH, add=False):
        assert not add
        self.device.launch(CALL + ROW * len(x_RH))
        out_RH.copy_(2 * x_RH)


class Rig:
    """Nodes 0 and 1 only prefill, 2 only decodes, 3 does both."""

    def __init__(self, share=1 / 16, one_queue=False):
        self.clock = FakeClock()
        self.device = ScriptedDevice(self.clock, BLOCK, one_queue)
        end, address = connect.listen("local", expert=0, attention_nodes=4, layout=LAYOUT)
        phase = AttentionPhase
        self.node = ExpertNode(
            ExpertPort(end, stage=ScriptedStage(self.device)),
            Bank(self.device),
            longest_hold=0.0,
            clock=self.clock,
            phases={0: phase.PREFILL, 1: phase.PREFILL, 2: phase.DECODE},
            prompt_share=share,
            device=self.device,
        )
        placement = Placement.contiguous(layers=LAYERS, experts=4, nodes=1)
        self.links = [
            ExpertLink(
                connect.connect([address], attention=a, layout=LAYOUT, timeout=60.0),
                attention=a,
                layout=LAYOUT,
                placement=placement,
                clock=self.clock,
            )
            for a in range(4)
        ]
        self.numbers = itertools.count(1)

    def send(self, a, layer=1, micro_batch=0, rows=2):
        value = float(next(self.numbers))
        expert_TK = torch.tensor([[0, 3]] * rows, dtype=torch.int32)
        x_TH, weight_TK = torch.full((rows, 8), value), torch.ones(rows, 2)
        ticket = self.links[a].dispatch(x_TH, expert_TK, weight_TK, layer=layer, micro_batch=micro_batch)
        return a, ticket, value

    def until_there(self, sent, most=1.0):
        """Seconds until the answer, which is right."""
        a, ticket, value = sent
        began = self.clock.now()
        while not self.links[a].ready(ticket):
            assert self.clock.now() - began < most, "no answer"
            self.node.poll()
            self.clock.advance(2e-6)
        assert (self.links[a].combine(ticket) == 2 * value).all()
        return self.clock.now() - began

    def is_there(self, sent):
        a, ticket, _ = sent
        return self.links[a].ready(ticket)


def test_decoding_waits_for_a_block_of_a_prompt_and_not_for_its_call():
    rig = Rig()
    chunk = rig.send(0, rows=512)
    rig.node.poll()
    assert rig.until_there(rig.send(2)) <= BLOCK + CALL + 2 * ROW + 10e-6
    assert not rig.is_there(chunk)
    rig.until_there(chunk)
    slow = Rig(one_queue=True)
    slow.send(0, rows=512)
    slow.node.poll()
    assert slow.until_there(slow.send(2)) > 512 * ROW + 2 * CALL


def test_nobody_blocks_on_the_answer_to_a_prompt():
    rig = Rig()
    chunk = rig.send(0, rows=512)
    rig.node.poll()
    began = rig.clock.now()
    rig.node.wait(1.0)
    assert rig.clock.now() - began < BLOCK, "the clock moves for who waits for a copy"
    rig.until_there(chunk)


def test_prompts_that_wait_on_the_host_share_a_call():
    rig = Rig()
    first = [rig.send(a, 1, m, rows=200) for a in (0, 1) for m in (0, 1)]
    rig.node.poll()
    assert rig.node.stats().calls == 1, "of four messages"
    more = [rig.send(3, layer, m, rows=300) for m, layer in ((0, 2), (1, 3))]
    rig.node.poll()
    rig.node.poll()
    assert rig.node.stats().calls == 2, "two calls are launched ahead, not more"
    for sent in (*first, *more):
        rig.until_there(sent)
    assert rig.node.stats().messages == 6 and rig.node.stats().rows == 4 * 200 + 2 * 300


@pytest.mark.parametrize("least", [1 / 16, 1 / 2])
def test_prompts_get_their_share_while_decoding_never_ends(least):
    """Two micro-batches that come back at once, so that decoding alone fills the device."""
    rig = Rig(share=least)
    chunk = rig.send(0, rows=512)
    rig.node.poll()
    began, decoding = rig.clock.now(), [rig.send(2, 2, m) for m in (0, 1)]
    while not rig.is_there(chunk):
        assert rig.clock.now() - began < 1.0, "prompts starve"
        rig.node.poll()
        for m, sent in enumerate(decoding):
            if rig.is_there(sent):
                rig.until_there(sent)
                decoding[m] = rig.send(2, 2, m)
        rig.clock.advance(2e-6)
    took, own = rig.clock.now() - began, CALL + 512 * ROW
    assert least * 0.7 <= own / took <= least + 0.3
    for sent in decoding:
        rig.until_there(sent)


def test_a_message_in_a_box_whose_prompt_is_not_done_comes_behind_it():
    """Else the older answer could be written over the newer one."""
    rig = Rig()
    rig.send(3, 1, rows=512)
    rig.node.poll()
    newer = rig.send(3, 2, rows=2)
    assert rig.until_there(newer) > 512 * ROW
    assert rig.until_there(rig.send(3, 2, rows=2)) < 512 * ROW


def test_a_node_that_leaves_while_its_prompts_run():
    rig = Rig()
    rig.send(0, rows=512)
    rig.node.poll()
    rig.links[0].close()
    for _ in range(3):
        rig.node.wait(0.0)
        rig.node.poll()
    rig.until_there(rig.send(1, rows=300))
    rig.until_there(rig.send(2))
    rig.clock.advance(1.0)
    assert rig.node.poll() == 0


def test_a_node_that_prefilled_decodes_from_now_on():
    rig = Rig()
    rig.node.in_phases({0: AttentionPhase.DECODE})
    chunk = rig.send(1, rows=300)
    rig.node.poll()
    assert rig.until_there(rig.send(0, rows=200)) < BLOCK + CALL + 201 * ROW + 10e-6
    rig.until_there(chunk)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 1),
            st.integers(0, LAYERS - 1),
            st.integers(1, 300),
            st.integers(0, 400),
        ),
        max_size=40,
    )
)
def test_every_answer_is_of_its_rows(sends):
    rig = Rig()
    flying: dict[tuple[int, int], Any] = {}
    for a, m, layer, rows, pause in sends:
        before = flying.pop((a, m), None)
        if before is not None and layer:
            rig.until_there(before)
        flying[a, m] = rig.send(a, layer, m, rows)
        rig.node.poll()
        rig.clock.advance(1e-6 * pause)
    for sent in flying.values():
        rig.until_there(sent)


def test_time_without_prompts_is_nobodys_share():
    rig = Rig()
    for _ in range(20):
        rig.until_there(rig.send(2))
    queues = rig.node._queues
    assert queues is not None
    rig.send(0, rows=300)
    rig.node.poll()
    assert not queues.is_due and queues.busy
    rig.clock.advance(1.0)
    queues.look()
    assert not queues.busy and not queues.holds(Box(0, 0, 0))


@pytest.mark.slow
def test_decoding_beside_prompts_costs_a_block_and_prompts_what_decoding_takes():
    brief: dict[str, Any] = {"period": 0.3, **DEVICE}
    alone, without = run(Case("alone", FAST, **brief)), run(Case("prompts", (), CHUNKS, **brief))
    both = run(Case("both", FAST, CHUNKS, **brief))
    mixed = run(Case("one queue", FAST, CHUNKS, one_queue=True, **brief))
    assert both["token_p99_ms"] <= 1.02 * alone["token_p99_ms"] < mixed["token_p99_ms"]
    assert both["prompt_tok_s"] >= 0.87 * without["prompt_tok_s"]


class Stream:
    """As `torch.cuda.Stream`; `log` has what was asked of all."""

    log: ClassVar[list[tuple[object, ...]]] = []

    def __init__(self, device="cuda:0", priority=0):
        self.device, self.priority = device, priority

    def wait_stream(self, other):
        self.log.append(("wait", self.priority, other.priority))


class Rows(torch.Tensor):
    def record_stream(self, stream):
        Stream.log.append(("keep", stream.priority))


def test_the_streams_of_a_gpu(monkeypatch):
    usual = Stream(priority="usual")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: usual)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    device = DeviceQueuePair(CudaDevice(torch.device("cuda:0")))
    Stream.log.clear()
    with device.decoding(Rows()):
        pass
    with device.prompts(Rows(), Rows()):
        pass
    assert Stream.log == [
        ("wait", -1, "usual"),
        ("keep", -1),
        ("wait", 0, "usual"),
        ("keep", 0),
        ("keep", 0),
    ]


def test_a_fill_begins_when_the_device_has_read_what_it_overwrites(monkeypatch):
    """In the thread that fills, whose device is another one; an expert that cannot be read ends it as well."""
    log: list[object] = []
    place = torch.device("cuda:2")

    @contextmanager
    def entered(device):
        log.append(("enter", device))
        yield
        log.append("leave")

    class Slots:
        expert_bytes = 1

        def fill(self, layer, slot, expert):
            log.append(expert)
            if expert == 7:
                raise CheckpointError("expert 7 cannot be read")

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(("wait", device)))
    filler = Filler(Slots(), inside=partial(alone_on, CudaDevice(place)))
    filler.submit(1, [Fill(layer=0, node=0, slot=0, expert=expert) for expert in (5, 7)], urgent=True)
    filler.work()
    assert log == [("enter", place), ("wait", place), 5, ("wait", place), "leave"]
    log.clear()
    filler.work()
    filler.work()
    assert log[:3] == [("enter", place), ("wait", place), 7]
    (done,) = filler.finished()
    assert done.experts == 1 and done.why == "expert 7 cannot be read"
    with alone_on(HostDevice(torch.device("cpu"))):
        assert log[3:] == []


def test_a_host_has_no_queues():
    assert queues_of(device_of(torch.device("cpu"))) is None
    assert queue_per_box(device_of(torch.device("cpu"))) is None


def test_what_decoding_takes_is_counted_while_prompts_are_there_only():
    clock = FakeClock()
    device = ScriptedDevice(clock, BLOCK)
    queues = DeviceQueues(device, clock, floor=0.5)
    with queues.decoding():
        device.launch(1.0)
    assert not queues._decodes
    with queues.prompts([Box(0, 0, 0)]):
        device.launch(1.0)
    with queues.decoding():
        device.launch(0.5)
    clock.advance(1.5)
    queues.look()
    assert not queues.is_due, "0.5 s of 1.5 s"
    with queues.decoding():
        device.launch(1.0)
    clock.advance(1.1)
    queues.look()
    assert queues.is_due, "1.5 s of 2.6 s"


def test_loops_take_turns_in_queues_of_their_own(monkeypatch):
    """On each device, the first one last, so that it is current; one loop, a CPU and a library of kernels have none."""
    log = []

    class Place(HostDevice):
        later = True
        made = 0

        def queue(self, priority=0):
            self.made += 1
            return Turn(f"{self.where} {self.made}")

    class Turn:
        def __init__(self, name):
            self.name = name

        @contextmanager
        def inside(self, *tensors):
            log.append(f"in {self.name}")
            yield
            log.append(f"out {self.name}")

    found: dict[torch.device, Place] = {}
    monkeypatch.setattr(device_queues, "device_of", lambda where: found.setdefault(where, Place(where)))

    def loop(name):
        for turn in range(2):
            log.append(f"{name}{turn}")
            yield turn

    places = [torch.device("cuda:0"), torch.device("cuda:1")]
    first, second = in_queues_apart([loop("a"), loop("b")], places, "")
    assert [next(first), next(second), next(first)] == [0, 0, 1]
    turns = [("1", "a0"), ("2", "b0"), ("1", "a1")]
    assert log == [
        line
        for number, said in turns
        for line in (
            f"in cuda:1 {number}", f"in cuda:0 {number}", said, f"out cuda:0 {number}", f"out cuda:1 {number}",
        )
    ]  # fmt: skip
    one, two = loop("a"), loop("b")
    assert in_queues_apart([one], places, "") == [one]
    assert in_queues_apart([one, two], places, "flashinfer") == [one, two]
    monkeypatch.setattr(device_queues, "device_of", HostDevice)
    assert in_queues_apart([one, two], [torch.device("cpu")], "") == [one, two]
