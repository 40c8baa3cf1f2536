"""`symm` passes every transport's battery: between processes that share one GPU or have one each, and in Triton's
interpreter over host memory that both ends map where there is none.

With a GPU everything is `pytest tests/kernels/triton/test_symm.py tests/kernels/triton/test_symm_transport.py`.
"""

import socket
import threading
import time

import pytest
import torch

from afserve.comm.device_exchange.ends import Boxes, Patience, SymmAttention, SymmExpert
from afserve.comm.device_exchange.region import Region
from afserve.comm.peer_memory.cuda_driver import CudaDriver
from afserve.comm.peer_memory.ipc_domain import IpcDomain
from afserve.comm.transport import Box, Connecting, Kind, Layout, ListenSpec, Parcel, WireType
from afserve.comm.transports import dist, symm
from afserve.errors import ConfigError, PeerLost, RendezvousError
from tests.comm.begun import FORKED, import_also
from tests.comm.conformance import BATTERY, LAYOUT, PATIENCE, Ends, answer, arrive, content, send
from tests.comm.fake_libcuda import FakeCuda
from tests.kernels.triton.symm_nodes import fill, on_host, remote_end, way

CUDA = torch.cuda.is_available()
BOX = Box(0, 0, 0)


class OnHost:
    """An end whose parcels are copies in host memory, as the battery compares them."""

    def __init__(self, end):
        self._end, self._staged = end, {}
        self.layout = end.layout

    def __getattr__(self, word):
        return getattr(self._end, word)

    def stage(self, box, header):
        there = self._end.stage(box, header)
        here = on_host(there)
        self._staged[box] = here, there
        return here

    def post(self, box):
        fill(*self._staged[box])
        self._end.post(box)

    def take(self, box):
        return on_host(self._end.take(box))


class Remote:
    """An expert node's end in a process of its own, as if it were here: what it takes and stages is copied."""

    def __init__(self, expert, attention, layout):
        self.layout, self._staged = layout, {}
        import_also("tests.kernels.triton.symm_nodes")
        self._pipe, theirs = FORKED.Pipe()
        self._process = FORKED.Process(
            target=remote_end, args=(expert, attention, layout, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self.address = self._answer()

    def _answer(self):
        assert self._pipe.poll(120), "the other process does not answer"
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            self._process.join(20)
            raise AssertionError(f"the other process ended with {self._process.exitcode}") from None
        if kind == "lost":
            raise PeerLost(*value)
        if kind == "error":
            raise value
        return value

    def _ask(self, *words):
        self._pipe.send(words)
        return self._answer()

    def ready(self, boxes):
        return self._ask("ready", boxes)

    def wait(self, boxes, timeout):
        return self._ask("wait", boxes, timeout)

    def take(self, box):
        return self._ask("take", box)

    def refuse(self, box, reason):
        self._ask("refuse", box, reason)

    def boxes(self):
        return self._ask("boxes")

    def stage(self, box, header):
        parcel = Parcel(header, torch.zeros(header.rows, self.layout.hidden, dtype=header.wire.dtype))
        self._staged[box] = parcel
        return parcel

    def post(self, box):
        self._ask("post", box, self._staged[box])

    def close(self):
        if self._process.is_alive():
            self._ask("close")
        self._process.join(20)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def kill(self):
        self._process.kill()
        self._process.join()


def between_processes(attention, experts, layout):
    remotes = [Remote(f, attention, layout) for f in range(experts)]
    addresses = {f: remote.address for f, remote in enumerate(remotes)}
    fronts = [OnHost(dist.connect(Connecting(addresses, a, layout, 60.0), way(a))) for a in range(attention)]
    return Ends(fronts, remotes)


def in_this_process(attention, experts, layout):
    pairs = [dist.listen(ListenSpec(f, attention, layout), way()) for f in range(experts)]
    addresses = {f: address for f, (_, address) in enumerate(pairs)}
    fronts = [OnHost(dist.connect(Connecting(addresses, a, layout, 10.0), way())) for a in range(attention)]
    return Ends(fronts, [OnHost(end) for end, _ in pairs])


@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
def test_battery(check):
    """In one process without a GPU: it is quicker."""
    check(between_processes if CUDA else in_this_process)


@pytest.mark.process
def test_two_processes_and_one_that_dies():
    ends = between_processes(1, 1, LAYOUT)
    front, back = ends.attention[0], ends.experts[0]
    for turn in range(3):
        sent = send(front, BOX, turn, 4)
        got = arrive(back, BOX)
        assert got.header == sent.header and torch.equal(got.x_RH, sent.x_RH.cpu())
        answer(back, BOX, got.header, 9 + turn)
        assert torch.equal(arrive(front, BOX).x_RH.cpu(), content(9 + turn, 4, LAYOUT.hidden))
    back.kill()
    with pytest.raises(PeerLost, match="expert-0"):
        front.wait([BOX], PATIENCE)
    ends.close()


def test_a_flag_that_is_never_raised_makes_the_payload_no_number_and_ends_the_pair(monkeypatch):
    if CUDA:
        pytest.skip("both ends are in this process")
    ends = in_this_process(1, 1, LAYOUT)
    monkeypatch.setattr("afserve.comm.transports.symm.SymmPair.send", lambda *_: None)
    send(ends.attention[0], BOX, 1, 2)
    got = arrive(ends.experts[0], BOX)
    assert got.x_RH.isnan().all() and (got.slot_RK == -1).all()
    monkeypatch.undo()
    answer(ends.experts[0], BOX, got.header, 1)
    with pytest.raises(PeerLost, match="attention-0: its connection has ended"):
        ends.experts[0].wait([BOX], PATIENCE)
    ends.close()


def test_a_mailbox_of_a_pair_that_ended_is_memory_of_its_own():
    """Who stages before it knows that the peer is gone must not write where the peer's memory was."""
    if CUDA:
        pytest.skip("both ends are in this process")
    ends = in_this_process(1, 1, LAYOUT)
    front = ends.attention[0]
    outbox = front._lanes.outgoing(BOX)
    before = outbox.payload_B.data_ptr()
    ends.experts[0].close()
    with pytest.raises(PeerLost, match="expert-0"):
        front.wait([BOX], PATIENCE)
    assert outbox.payload_B.data_ptr() != before
    with pytest.raises(PeerLost, match="expert-0"):
        send(front, BOX, 1, 2)
    front.close()


def streams_of(end):
    """Once the newcomer is let in."""
    until = time.monotonic() + PATIENCE
    while not end._streams and time.monotonic() < until:
        end.wait([BOX], 0.01)
    return end._streams.values()


def test_messages_go_on_when_their_numbers_wrap():
    if CUDA:
        pytest.skip("both ends are in this process")
    ends = in_this_process(1, 1, LAYOUT)
    front, back = ends.attention[0], ends.experts[0]
    for end in (front, back):
        (stream,) = streams_of(end)
        for counts in (stream._pair._sent, stream._pair._received):
            counts.fill_(2**31 - 2)
    for turn in range(4):
        sent = send(front, BOX, turn, 4)
        got = arrive(back, BOX)
        assert torch.equal(got.x_RH, sent.x_RH)
        answer(back, BOX, got.header, turn)
        assert torch.equal(arrive(front, BOX).x_RH, content(turn, 4, LAYOUT.hidden))
    assert stream._pair._received[0, 0] == -(2**31) + 2
    ends.close()


def test_the_host_ends_a_wait_for_a_payload_that_does_not_come(monkeypatch):
    """A peer that was killed between its header and its payload: as soon as its connection has ended."""
    if CUDA:
        pytest.skip("both ends are in this process")
    monkeypatch.setattr(symm, "_LOOKS", 1 << 40)
    ends = in_this_process(1, 1, LAYOUT)
    back = ends.experts[0]
    (stream,) = streams_of(back)
    payload_B = torch.zeros(64, dtype=torch.uint8)
    waiting = threading.Thread(target=lambda: stream._pair.receive(payload_B, 0, PATIENCE), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    ends.attention[0].close()
    with pytest.raises(PeerLost, match="attention-0: its connection has ended"):
        back.wait([BOX], PATIENCE)
    waiting.join(PATIENCE)
    assert not waiting.is_alive() and (payload_B == 255).all()
    back.close()


def test_an_end_that_cannot_share_is_named_to_the_other_one():
    if CUDA:
        pytest.skip("both ends are in this process")
    end, address = dist.listen(ListenSpec(0, 1, LAYOUT), way())
    broken = symm.carriage(torch.device("cpu"), CudaDriver(torch.device("cpu"), FakeCuda()), chip=False)
    with pytest.raises(
        RendezvousError,
        match=r"expert-0 did not meet attention-0 .*it shares \d+ bytes of host memory and this end",
    ):
        dist.connect(Connecting({0: address}, 0, LAYOUT, 10.0), broken)
    good = dist.connect(Connecting({0: address}, 0, LAYOUT, 10.0), way())
    good.close()
    end.close()


def test_an_address_of_another_kind_is_none():
    with pytest.raises(
        RendezvousError, match=r"expert-0: 'symm:127.0.0.1:9' is not an address of the form symm:NAME"
    ):
        dist.connect(Connecting({0: "symm:127.0.0.1:9"}, 0, LAYOUT, 1.0), way())
    with pytest.raises(
        RendezvousError, match=r"expert-0: nobody answers at afserve-rows-00 .*same network namespace"
    ):
        dist.connect(Connecting({0: "symm:afserve-rows-00"}, 0, LAYOUT, 1.0), way())


@pytest.mark.skipif(CUDA, reason="there is a GPU")
def test_without_a_gpu_the_error_says_what_to_do():
    with pytest.raises(ConfigError, match=r"device cpu is none of this machine's GPUs.*another --transport"):
        symm.listen(ListenSpec(0, 1, LAYOUT, device=torch.device("cpu")))


V3 = Layout(7168, 8, 128, 1, 2, 32, WireType.FLOAT8, WireType.BFLOAT16)


def serve_graph(connection, replays, pipe):
    """An expert node whose whole layer is one graph: FFN of global slot s is (s + 1) * x."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    shared = share_boxes(connection, device)
    end = SymmExpert(V3, [one_box(shared)], Patience(20_000_000_000), torch.bfloat16)

    def layer():
        arrival = end.receive(0)
        here_NK = arrival.slot_NK >= 0
        factor_N = (here_NK * arrival.weight_NK * (arrival.slot_NK + 1)).sum(1)
        x_NH = torch.where(here_NK.any(1)[:, None], arrival.x_NH.float(), 0.0)
        end.answer(arrival, (factor_N[:, None] * x_NH).to(torch.bfloat16))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()  # compiles; the front sends one dispatch without a graph first
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    pipe.send("captured")
    for _ in range(replays):
        graph.replay()
    end.check()
    pipe.send("done")
    pipe.recv()


def share_boxes(connection, device):
    size = max(Region.of(kind, V3).size for kind in (Kind.DISPATCH, Kind.COMBINE))
    return IpcDomain(CudaDriver(device)).share(connection, size, 60.0)


def one_box(shared):
    return Boxes.at([shared.mine_B.data_ptr()], [shared.theirs_B.data_ptr()], shared.mine_B.device, shared)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_graph_replays_dispatch_and_combine_with_other_rows():
    replays, device = 5, torch.device("cuda", 0)
    torch.cuda.set_device(device)
    here, there = socket.socketpair()
    pipe, theirs = FORKED.Pipe()
    process = FORKED.Process(target=serve_graph, args=(there, replays, theirs), daemon=True)
    process.start()
    shared = share_boxes(here, device)
    end = SymmAttention(V3, [one_box(shared)], Patience(20_000_000_000))
    x_TH = torch.zeros(128, 7168, dtype=torch.bfloat16, device=device)
    slot_TK = torch.zeros(128, 8, dtype=torch.int32, device=device)
    weight_TK = torch.ones(128, 8, device=device)
    stamp = torch.tensor([0, 1], dtype=torch.int32, device=device)
    end.combine(end.dispatch(x_TH, slot_TK, weight_TK, stamp, 0))
    end.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TH = end.combine(end.dispatch(x_TH, slot_TK, weight_TK, stamp, 0))
    assert pipe.poll(120) and pipe.recv() == "captured"
    for turn in range(replays):
        x_TH.fill_(1.75 * (1 + turn))  # exact in e4m3 with any scale that is a power of two times it
        slot_TK.copy_(torch.randint(-1, 32, (128, 8), device=device))
        slot_TK[64 + turn :] = -1
        graph.replay()
        factor_T = ((slot_TK >= 0) * (slot_TK + 1)).sum(1, keepdim=True)
        torch.testing.assert_close(y_TH, factor_T * x_TH.float(), rtol=2**-7, atol=0)
    end.check()
    assert pipe.poll(60) and pipe.recv() == "done"
    pipe.send("bye")
    process.join(20)
