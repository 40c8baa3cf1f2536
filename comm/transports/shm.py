"""One host: mailboxes in shared memory without a name, so nothing is left behind however a process ends.

The expert node owns the memory (a sealed memfd); attention nodes of the same user open it through /proc. A waiting end
blocks on a futex. A peer that died is noticed through its pidfd and named. It knows nothing of what travels.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from afserve import member
from afserve.comm.mailbox.lanes import Lanes
from afserve.comm.mailbox.rendezvous import compare, terms
from afserve.comm.mailbox.segment import HERE, LEFT, PAGE, DialledSegment, Segment, SegmentMap, read_terms
from afserve.comm.mailbox.wire import check_layout
from afserve.comm.transport import Answered, Box, Connecting, Dialled, Layout, ListenSpec, Offers
from afserve.comm.transports.door import Door
from afserve.comm.transports.lane_end import MemoryEnd
from afserve.comm.transports.lost import Lost
from afserve.comm.transports.peers import PeerProcess
from afserve.errors import RendezvousError
from afserve.kernels.stack import Exchange, LayeredExperts

# How often a waiting end asks whether its peers live. For an attention node that waits in vain every moment is one in
# which replicas could be computing; an expert node often waits long, and is needed by nobody who is gone.
_ATTENTION_LOOKS, _EXPERT_LOOKS = 0.02, 0.1
_RETRY_SECONDS = 0.02


class ShmTransport(MemoryEnd):
    """One end. `attention` is None on the expert node, which keeps `fd`, the memory's only name."""

    def __init__(self, segments: Sequence[Segment], attention: int | None, fd: int | None = None) -> None:
        lost = Lost(attention_side=attention is not None)
        super().__init__(Lanes(segments, attention), segments[0].map.layout, attention, lost)
        self._segments = {segment.map.expert: segment for segment in segments}
        self._fd = fd
        self._peers: dict[int, PeerProcess] = {}
        self._turns: dict[int, int] = {}
        self._looked = 0.0
        self.look_seconds = _EXPERT_LOOKS if attention is None else _ATTENTION_LOOKS
        self._door = 0
        self._borrow: Callable[[Tensor | None, int], bool] | None = None
        for segment in segments:
            segment.draw_near(attention)
            segment.claim(attention, os.getpid())
        self._look()

    @property
    def offers(self) -> Offers:
        return Offers(sender=self, limiting=self, answering=self, exchanging=self, sharing_cores=self)

    def watch(self, files: int, door: Door) -> None:
        """From now on a wait of at most `look_seconds` also ends when something is ready in `files`, an epoll with
        `door` among its files."""
        self._door = door.number
        for segment in self._segments.values():
            segment.set_door(self._attention, door.number)
        self._lanes.watch(files, door.socket.fileno())

    def share_cores(self, borrow: Callable[[Tensor | None, int], bool]) -> bool:
        """As `transport.SharingCores`, between the first attention node and the only expert node."""
        self._borrow = borrow
        return self._share_core()

    def _share_core(self) -> bool:
        if self._borrow is None:
            return False
        if len(self._segments) != 1 or self._attention not in (None, 0):
            self._borrow(None, 0)
            return False
        (segment,) = self._segments.values()
        mine, theirs = (None, 0) if self._attention is None else (0, None)
        own, peer = segment.bell(mine), segment.bell(theirs)
        return self._borrow(peer.memory_B, peer.offset) and self._lanes.lend(own, peer)

    def wait(self, boxes: Sequence[Box], timeout: float) -> list[Box]:
        """On an expert node a lost attention node is raised once; its boxes may then be waited on for a successor."""
        found = self._lanes.ready(boxes)
        if found:
            return found
        if not boxes:
            time.sleep(timeout)  # no bell rings for nobody
            return []
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            found = self._lanes.wait(boxes, max(0.0, min(left, self.look_seconds)))
            if found:
                return found
            self._look_sometimes()
            if self._lost:
                found = self._lanes.ready(boxes)  # what came before the loss counts
                if found:
                    return found
                self._lost.raise_for(boxes)
            if left <= self.look_seconds:
                return []

    def answer(
        self,
        experts: LayeredExperts,
        epochs: Collection[int],
        most_rows: Callable[[int], int],
        wait: float,
        serve: float,
    ) -> Answered | None:
        """As `transport.AnsweringLoop`."""
        return self._lanes.answer(experts, epochs, most_rows, wait, serve)

    def exchange(
        self, boxes: Sequence[Box], routes: Sequence[object], epoch: int, patience: float
    ) -> Exchange | None:
        """As `transport.Exchanging`."""
        return None if self._lost else self._lanes.exchange(boxes, routes, epoch, patience)

    def exchanged(self, boxes: Sequence[Box]) -> list[int]:
        return self._lanes.exchanged(boxes)

    def last_answers(self, boxes: Sequence[Box]) -> list[tuple[int, int]]:
        """As `transport.Exchanging`."""
        return self._lanes.last_answers(boxes)

    def close(self) -> None:
        """Tell the peers. The memory itself goes when the last tensor over it does."""
        for segment in self._segments.values():
            segment.leave(self._attention)
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def dial(self, expert: int, address: str, timeout: float) -> DialledSegment:
        assert self._attention is not None, "an expert node attaches nobody"
        return dial(expert, address, self._attention, self._layout, timeout)

    def attach(self, dialled: Dialled) -> None:
        assert isinstance(dialled, DialledSegment), "dialled on another transport"
        dialled.segment.draw_near(self._attention)
        dialled.segment.claim(self._attention, os.getpid())
        dialled.segment.set_door(self._attention, self._door)
        self._leave(dialled.expert)
        self._segments[dialled.expert] = dialled.segment
        self._rebuild()
        self._look()

    def detach(self, expert: int) -> None:
        self._leave(expert)
        self._rebuild()

    def _leave(self, expert: int) -> None:
        if expert in self._segments:
            self._segments.pop(expert).leave(self._attention)
        self._forget(expert)
        self._turns.pop(expert, None)
        self._lost.forget_loss(expert)

    def _rebuild(self) -> None:
        self._segments = dict(sorted(self._segments.items()))
        self._lanes.rebuild(list(self._segments.values()))
        self._share_core()

    def _look_sometimes(self) -> None:
        now = time.monotonic()
        if now - self._looked >= self.look_seconds:
            self._looked = now
            self._look()

    def _look(self) -> None:
        """Bring `_peers` and `_lost` up to date with the records and with the kernel."""
        if self._attention is None:
            segment = next(iter(self._segments.values()))
            for attention in range(segment.map.attention_nodes):
                self._look_at(segment, attention, attention, str(member.attention_node(attention)))
        else:
            for expert, segment in self._segments.items():
                self._look_at(segment, None, expert, str(member.expert_node(expert)))

    def _look_at(self, segment: Segment, record: int | None, key: int, name: str) -> None:
        turn = segment.turn(record)
        if turn != self._turns.get(key, 0):
            self._turns[key] = turn
            self._forget(key)
            self._lost.forget_loss(key)
            self._peers[key] = PeerProcess(name, segment.pid(record))
        if key not in self._peers:
            return
        if segment.state(record) == LEFT:
            self._lost.mark(key, "it has left")
        elif self._peers[key].gone():
            self._lost.mark(key, f"its process {segment.pid(record)} has ended")
        if key in self._lost:
            self._forget(key)

    def _forget(self, key: int) -> None:
        if key in self._peers:
            self._peers.pop(key).close()


def listen(at: ListenSpec) -> tuple[ShmTransport, str]:
    """An expert node's end and its address, `shm:PID:FD`."""
    check_layout(at.layout)
    expert, where = at.expert, SegmentMap(at.layout, at.expert, at.attention_nodes)
    fd = os.memfd_create(f"afserve-expert-{expert}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, where.total_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    segment = _map(fd, where)
    segment.write_terms(terms(at.layout, expert=expert, attention_nodes=at.attention_nodes))
    return ShmTransport([segment], None, fd), f"shm:{os.getpid()}:{fd}"


def connect(to: Connecting) -> ShmTransport:
    """An attention node's end, over the memory of every expert node in order."""
    deadline = time.monotonic() + to.timeout
    segments = [_open(address, expert, to.attention, to.layout) for expert, address in to.addresses.items()]
    for segment in segments:
        _await_vacancy(segment, to.attention, deadline)
    return ShmTransport(segments, to.attention)


def dial(expert: int, address: str, attention: int, layout: Layout, timeout: float) -> DialledSegment:
    """An expert node's memory, for `attach` of whichever end."""
    segment = _open(address, expert, attention, layout)
    _await_vacancy(segment, attention, time.monotonic() + timeout)
    return DialledSegment(segment)


def _open(address: str, expert: int, attention: int, layout: Layout) -> Segment:
    peer = str(member.expert_node(expert))
    try:
        _, pid, number = address.split(":")
        path = f"/proc/{int(pid)}/fd/{int(number)}"
    except ValueError as error:
        raise RendezvousError(f"{peer}: {address!r} is not an address of the form shm:PID:FD") from error
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RendezvousError(
            f"{peer}: its shared memory at {address} cannot be opened ({error.strerror}); "
            "is it running, on this host, as this user?"
        ) from error
    try:
        return _verified(fd, peer, expert, attention, layout)
    finally:
        os.close(fd)


def _verified(fd: int, peer: str, expert: int, attention: int, layout: Layout) -> Segment:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RendezvousError(
            f"{peer}: what lies at its address is not shared memory of afserve's"
        ) from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise RendezvousError(f"{peer}: its shared memory could be cut short while in use; refused")
    there = os.fstat(fd).st_size
    if there < PAGE:
        raise RendezvousError(f"{peer}: its shared memory has {there} bytes, less than its first page")
    with mmap.mmap(fd, PAGE, prot=mmap.PROT_READ) as page:
        size, theirs = read_terms(memoryview(page.read(PAGE)), peer)
    mine = terms(layout, expert=expert, attention_nodes=max(theirs["attention_nodes"], attention + 1))
    compare(mine, theirs, me=str(member.attention_node(attention)), peer=peer)
    where = SegmentMap(layout, expert, theirs["attention_nodes"])
    if not where.total_bytes == size == there:
        raise RendezvousError(
            f"{peer}: its shared memory has {there} bytes, says {size}, expected {where.total_bytes}"
        )
    return _map(fd, where)


def _map(fd: int, where: SegmentMap) -> Segment:
    return Segment(where, torch.frombuffer(mmap.mmap(fd, where.total_bytes), dtype=torch.uint8))


def _await_vacancy(segment: Segment, attention: int, deadline: float) -> None:
    """A predecessor of the same index may still be on its way out."""
    while segment.state(attention) == HERE:
        peer = PeerProcess(str(member.attention_node(attention)), segment.pid(attention))
        gone = peer.gone()
        peer.close()
        if gone:
            return
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"{member.attention_node(attention)} is already connected to {member.expert_node(segment.map.expert)} "
                f"as process {segment.pid(attention)}; give this node another index"
            )
        time.sleep(_RETRY_SECONDS)
