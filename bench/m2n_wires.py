"""Round trips over one wire: what each process of a measurement does.

Every attention node sends the same number of bytes to every expert node and gets as many back. Each end passes on what
came in, so that one direction is one copy where the wire needs no more. A wire is two functions, one for either side;
the attention side's returns seconds per round trip.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
import torch.distributed as dist

from afserve.comm.transport import Box, Header, Kind, Layout, Transport, WireType
from afserve.comm.transports import connect

NO_WIRES = ("local", "symm")  # one thread; GPUs (bench.m2n_cuda)
ROW_BYTES = 2048
PATIENCE = 30.0
COLD_BYTES = 256 << 20  # more than a core's own caches


@dataclass(frozen=True)
class Case:
    """One measurement. `folder` is where the processes meet."""

    wire: str
    bytes: int
    attention: int
    experts: int
    rounds: int
    warm: int
    folder: str

    @property
    def total(self) -> int:
        return self.rounds + self.warm


Side = Callable[[int, Case, Barrier], list[float]]
Send = Callable[..., None]  # (box, header, rows, slots, weights)


def _layout(case: Case) -> Layout:
    rows = case.bytes // ROW_BYTES
    return Layout(ROW_BYTES // 4, 1, rows, 1, 1, 1, WireType.FLOAT32, WireType.FLOAT32)


def sender(end: Transport) -> Send:
    """As links and ports do: in one call where the transport has it."""
    if end.offers.sender is not None:
        return end.offers.sender.send

    def send(box: Box, header: Header, x_RH, slot_RK=None, weight_RK=None) -> None:
        parcel = end.stage(box, header)
        parcel.x_RH.copy_(x_RH)
        if slot_RK is not None:
            assert parcel.slot_RK is not None and parcel.weight_RK is not None
            parcel.slot_RK.copy_(slot_RK)
            parcel.weight_RK.copy_(weight_RK)
        end.post(box)

    return send


def mailbox_expert(kind: str) -> Side:
    return mailbox_expert_on(kind, "127.0.0.1")


def mailbox_expert_on(kind: str, host: str) -> Side:
    def serve(rank: int, case: Case, meet: Barrier) -> list[float]:
        end, address = connect.listen(
            kind, expert=rank, attention_nodes=case.attention, layout=_layout(case), host=host
        )
        Path(case.folder, f"address-{rank}").write_text(address)
        meet.wait()
        send, boxes, left = sender(end), end.boxes(), case.total * case.attention
        while left:
            for box in end.wait(boxes, PATIENCE):
                parcel = end.take(box)
                send(box, parcel.header._replace(kind=Kind.COMBINE), parcel.x_RH)
                left -= 1
        while (
            meet.n_waiting < case.attention
        ):  # the end of a long answer may still wait for room in the socket
            end.wait(boxes, 0.01)
        meet.wait()
        end.close()
        return []

    return serve


def mailbox_attention(_: str) -> Side:
    def measure(rank: int, case: Case, meet: Barrier) -> list[float]:
        meet.wait()
        addresses = [Path(case.folder, f"address-{f}").read_text() for f in range(case.experts)]
        layout = _layout(case)
        end = connect.connect(addresses, attention=rank, layout=layout, timeout=PATIENCE)
        send, boxes, rows, seconds = sender(end), end.boxes(), layout.max_rows, []
        last = {box: torch.ones(rows, layout.hidden) for box in boxes}
        slot_RK, weight_RK = torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1)
        for _ in range(case.total):
            began = time.perf_counter()
            for box in boxes:
                header = Header(Kind.DISPATCH, 0, end.next_sequence(box), 0, rows, WireType.FLOAT32)
                send(box, header, last[box], slot_RK, weight_RK)
            missing = set(boxes)
            while missing:
                for box in end.wait(list(missing), PATIENCE):
                    last[box] = end.take(box).x_RH
                    missing.remove(box)
            seconds.append(time.perf_counter() - began)
        assert all(float(x_RH[0, 0]) == 1.0 for x_RH in last.values())
        meet.wait()
        end.close()
        return seconds

    return measure


def _gloo(rank: int, case: Case) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{case.folder}/gloo",
        rank=rank,
        world_size=case.attention + case.experts,
    )


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "this process is one of the group"
    work.wait()


def _buffers(case: Case, count: int) -> list[torch.Tensor]:
    return [torch.ones(case.bytes, dtype=torch.uint8) for _ in range(count)]


def gloo_expert(rank: int, case: Case, meet: Barrier) -> list[float]:
    _gloo(case.attention + rank, case)
    buffers = _buffers(case, case.attention)
    meet.wait()
    for _ in range(case.total):
        for a, works in [(a, dist.irecv(buffers[a], a)) for a in range(case.attention)]:
            _wait(works)
            dist.send(buffers[a], a)
    meet.wait()
    dist.destroy_process_group()
    return []


def gloo_attention(rank: int, case: Case, meet: Barrier) -> list[float]:
    _gloo(rank, case)
    buffers, seconds = _buffers(case, case.experts), []
    peers = [case.attention + f for f in range(case.experts)]
    meet.wait()
    for _ in range(case.total):
        began = time.perf_counter()
        for work in [dist.isend(buffer, peer) for buffer, peer in zip(buffers, peers)]:
            _wait(work)
        for work in [dist.irecv(buffer, peer) for buffer, peer in zip(buffers, peers)]:
            _wait(work)
        seconds.append(time.perf_counter() - began)
    meet.wait()
    dist.destroy_process_group()
    return seconds


def alltoall(is_attention: bool) -> Side:
    """Two all_to_all_single: dispatch and combine."""

    def run(rank: int, case: Case, meet: Barrier) -> list[float]:
        a, f, size = case.attention, case.experts, case.bytes
        _gloo(rank if is_attention else a + rank, case)
        fan, none = (
            ([0] * a + [size] * f, [0] * (a + f)) if is_attention else ([size] * a + [0] * f, [0] * (a + f))
        )
        buffer, empty, seconds = torch.ones(sum(fan), dtype=torch.uint8), torch.ones(0, dtype=torch.uint8), []
        meet.wait()
        for _ in range(case.total):
            began = time.perf_counter()
            if is_attention:
                dist.all_to_all_single(empty, buffer, none, fan)
                dist.all_to_all_single(buffer, empty, fan, none)
            else:
                dist.all_to_all_single(buffer, empty, fan, none)
                dist.all_to_all_single(empty, buffer, none, fan)
            seconds.append(time.perf_counter() - began)
        meet.wait()
        dist.destroy_process_group()
        return seconds

    return run


def unix_expert(rank: int, case: Case, meet: Barrier) -> list[float]:
    """One pair only."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{case.folder}/socket")
    listener.listen(1)
    meet.wait()
    peer, _ = listener.accept()
    buffer = memoryview(bytearray(case.bytes))
    for _ in range(case.total):
        _receive(peer, buffer)
        peer.sendall(buffer)
    meet.wait()
    peer.close()
    listener.close()
    return []


def unix_attention(rank: int, case: Case, meet: Barrier) -> list[float]:
    meet.wait()
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(f"{case.folder}/socket")
    buffer, seconds = memoryview(bytearray(case.bytes)), []
    for _ in range(case.total):
        began = time.perf_counter()
        peer.sendall(buffer)
        _receive(peer, buffer)
        seconds.append(time.perf_counter() - began)
    meet.wait()
    peer.close()
    return seconds


def _receive(peer: socket.socket, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        done += peer.recv_into(buffer[done:])


def memcpy_attention(rank: int, case: Case, meet: Barrier) -> list[float]:
    """There and back in one thread: two copies between buffers that are its own."""
    there, back = _buffers(case, 2)
    seconds = []
    meet.wait()
    for _ in range(case.total):
        began = time.perf_counter()
        there.copy_(back)
        back.copy_(there)
        seconds.append(time.perf_counter() - began)
    meet.wait()
    return seconds


def cold_memcpy_attention(rank: int, case: Case, meet: Barrier) -> list[float]:
    """The same, but of data that this core has not just touched, as it is when another one wrote it."""
    pairs = [_buffers(case, 2) for _ in range(max(2, COLD_BYTES // (2 * case.bytes)))]
    seconds = []
    meet.wait()
    for turn in range(case.total):
        there, back = pairs[turn % len(pairs)]
        began = time.perf_counter()
        there.copy_(back)
        back.copy_(there)
        seconds.append(time.perf_counter() - began)
    meet.wait()
    return seconds


def idle(rank: int, case: Case, meet: Barrier) -> list[float]:
    meet.wait()
    meet.wait()
    return []


WIRES: dict[str, tuple[Side, Side]] = {
    **{
        kind: (mailbox_attention(kind), mailbox_expert(kind))
        for kind in connect.kinds()
        if kind not in NO_WIRES
    },
    "gloo": (gloo_attention, gloo_expert),
    "gloo_all_to_all": (alltoall(True), alltoall(False)),
    "unix": (unix_attention, unix_expert),
    "memcpy": (memcpy_attention, idle),
    "memcpy_cold": (cold_memcpy_attention, idle),
}
ONE_PAIR = ("unix", "memcpy", "memcpy_cold")
