"""A run over several hosts: shared memory between two nodes of a host, TCP between those of different hosts.

An expert node opens both, and its address says both, with a key of its host: `pairs:KEY|shm:...|tcp:...`. An attention
node takes shared memory where the key is its own. Each end is a transport of its own; this one knows which box belongs
to which, and how to wait for both at once: a native wait spins on flags and connections, and then sleeps in the
connections, where whoever writes into shared memory knocks (`door`).
"""

import os
import select
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from afserve import member
from afserve.comm.mailbox.mailbox import Mailbox
from afserve.comm.mailbox.segment import DialledSegment
from afserve.comm.transport import (
    HOST,
    Box,
    Connecting,
    Dialled,
    Header,
    Layout,
    ListenSpec,
    MessageFiller,
    Offers,
    Parcel,
)
from afserve.comm.transports import shm, tcp
from afserve.comm.transports.door import Door
from afserve.comm.transports.shm import ShmTransport
from afserve.comm.transports.tcp import DialledStream, TcpTransport
from afserve.errors import RendezvousError

End = ShmTransport | TcpTransport
_APART = 100e-6  # s between two looks at the connections while messages come through memory
_REST = 100e-6  # s for which the rest of a message that comes by a connection is waited for there alone


def host_key() -> str:
    """Who has the same reaches the same memory: this boot of the kernel, these processes, this network, this user."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    spaces = (os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "net"))
    return "-".join((boot, *map(str, spaces), str(os.getuid())))


class PairsTransport:
    """One end. On an expert node both ends are there; on an attention node each is there once it has a peer."""

    def __init__(
        self, layout: Layout, to: Connecting | None, near: ShmTransport | None, far: TcpTransport | None
    ) -> None:
        """`to` is what an attention node was opened with, None on the expert node."""
        self._layout, self._to, self._attention = layout, to, None if to is None else to.attention
        self._near, self._far = near, far
        self._limits: dict[int, int] = {}
        self._by_tcp: set[Box] = set()  # on an expert node: those whose last dispatch came so
        self._known: Sequence[Box] | None = None
        self._halves: tuple[Sequence[Box], Sequence[Box]] = ((), ())
        self._looked = 0.0  # at the connections
        self._door: Door | None = None
        self._all: End | None = None  # the end of all boxes, while they have the same
        self._join()

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def device(self) -> torch.device:
        return HOST

    @property
    def offers(self) -> Offers:
        return Offers(sender=self, limiting=self)

    def boxes(self) -> list[Box]:
        return sorted({box for end in self._ends() for box in end.boxes()})

    def next_sequence(self, box: Box) -> int:
        return (self._all or self._end(box)).next_sequence(box)

    def limit(self, attention: int, rows: int) -> None:
        self._limits[attention] = rows
        for end in self._ends():
            end.limit(attention, rows)

    def stage(self, box: Box, header: Header) -> Parcel:
        return self._end(box).stage(box, header)

    def post(self, box: Box) -> None:
        self._end(box).post(box)

    def send(
        self,
        box: Box,
        header: Header,
        x_RH: Tensor,
        slot_RK: Tensor | None = None,
        weight_RK: Tensor | None = None,
    ) -> None:
        end = self._all or self._end(box)
        if end is self._near:
            end.send(box, header, x_RH, slot_RK, weight_RK)
        else:
            Mailbox.fill(end.stage(box, header), x_RH, slot_RK, weight_RK)
            end.post(box)

    def send_part(self, box: Box, header: Header, filler: MessageFiller) -> None:
        end = self._all or self._end(box)
        if end is self._near:
            end.send_part(box, header, filler)
        else:
            filler.fill(box.expert, end.stage(box, header))
            end.post(box)

    def ready(self, boxes: Sequence[Box]) -> list[Box]:
        near, far = self._split(boxes)
        found = self._near.ready(near) if self._near is not None and near else []
        # also where none of the boxes is its own: it moves bytes then
        return self._found(found, [] if self._far is None else self._far.ready(far))

    def wait(self, boxes: Sequence[Box], timeout: float) -> list[Box]:
        """A wait for what comes by memory also ends when the connections have something."""
        if self._near is None or self._far is None:
            return self._ends()[0].wait(boxes, timeout)
        near, far = self._split(boxes)
        if not near:
            return self._far.wait(far, timeout)
        left, deadline = timeout, time.monotonic() + timeout
        while True:
            by_memory = self._near.wait(near, min(left, self._near.look_seconds))
            now = time.monotonic()
            if by_memory and not self._is_time_for_tcp(now):
                return self._found(by_memory, [])
            by_tcp = self._far.ready(far)
            if not by_memory and not by_tcp and self._far.arriving:
                by_tcp = self._far.wait(far, min(max(left, 0.0), _REST))
            found = self._found(by_memory, by_tcp)
            if found:
                return found
            self._far.raise_lost(far)
            if (left := deadline - now) <= 0:
                return []

    def _is_time_for_tcp(self, now: float) -> bool:
        """Whether the connections have something that may have waited long, while messages come by memory."""
        if now - self._looked < _APART:
            return False
        self._looked = now
        assert self._far is not None
        return bool(self._far.files.poll(0))

    def take(self, box: Box) -> Parcel:
        return (self._all or self._end(box)).take(box)

    def refuse(self, box: Box, reason: str) -> None:
        self._end(box).refuse(box, reason)

    def close(self) -> None:
        for end in self._ends():
            end.close()
        if self._door is not None:
            self._door.close()

    def dial(self, expert: int, address: str, timeout: float) -> Dialled:
        assert self._to is not None and self._attention is not None, "an expert node attaches nobody"
        one = _choose(expert, address)
        if one.startswith("shm:"):
            if self._near is not None:
                return self._near.dial(expert, one, timeout)
            return shm.dial(expert, one, self._attention, self._layout, timeout)
        return DialledStream(*tcp.join(one, expert, replace(self._to, timeout=timeout)))

    def attach(self, dialled: Dialled) -> None:
        """A node that comes back may have moved to another host."""
        assert self._to is not None
        self._forget()
        self.detach(dialled.expert)
        if isinstance(dialled, DialledSegment):
            if self._near is None:
                self._near = ShmTransport([dialled.segment], self._attention)
            else:
                self._near.attach(dialled)
        else:
            if self._far is None:
                self._far = TcpTransport([], self._layout, self._to)
            self._far.attach(dialled)
        self._join()
        for attention, rows in self._limits.items():
            self.limit(attention, rows)

    def detach(self, expert: int) -> None:
        self._forget()
        for end in self._ends():
            end.detach(expert)

    def _join(self) -> None:
        """Once both ends are there, whoever sleeps for one of them is woken by the other."""
        if self._near is None or self._far is None:
            self._all = self._near or self._far
            return
        self._all = self._near if self._attention is None else None
        if self._door is not None:
            return
        self._door = Door()
        self._far.files.register(self._door.socket, select.EPOLLIN)
        self._near.watch(self._far.files.fileno(), self._door)

    def _ends(self) -> list[End]:
        return [end for end in (self._near, self._far) if end is not None]

    def _end(self, box: Box) -> End:
        if self._all is not None:
            return self._all
        assert self._near is not None and self._far is not None, "there is no end"
        far = box in self._by_tcp if self._attention is None else self._far.is_attached(box.expert)
        return self._far if far else self._near

    def _found(self, by_memory: list[Box], by_tcp: list[Box]) -> list[Box]:
        """All of them; an expert node answers the way they came."""
        if self._attention is None and (by_tcp or self._by_tcp):
            self._by_tcp.difference_update(by_memory)
            self._by_tcp.update(by_tcp)
            self._all = None if self._by_tcp else self._near
        return by_memory + by_tcp

    def _split(self, boxes: Sequence[Box]) -> tuple[Sequence[Box], Sequence[Box]]:
        """By end; on an expert node either may bring any of them. Kept for whoever asks again with the same."""
        if self._attention is None:
            return boxes, boxes
        if boxes is not self._known or not isinstance(boxes, tuple):
            near = tuple(box for box in boxes if self._end(box) is self._near)
            far = tuple(box for box in boxes if self._end(box) is self._far)
            self._known, self._halves = boxes, (near, far)
        return self._halves

    def _forget(self) -> None:
        self._known = None


def listen(at: ListenSpec) -> tuple[PairsTransport, str]:
    """An expert node's end and its address."""
    near, memory = shm.listen(at)
    try:
        far, port = tcp.listen(at)
    except BaseException:
        near.close()
        raise
    return PairsTransport(at.layout, None, near, far), f"pairs:{host_key()}|{memory}|{port}"


def connect(to: Connecting) -> PairsTransport:
    """An attention node's end, over whichever way suits each expert node."""
    chosen = {expert: _choose(expert, address) for expert, address in to.addresses.items()}
    memory = {expert: one for expert, one in chosen.items() if one.startswith("shm:")}
    ports = {expert: one for expert, one in chosen.items() if expert not in memory}
    near = shm.connect(replace(to, addresses=memory)) if memory else None
    try:
        far = tcp.connect(replace(to, addresses=ports)) if ports else None
    except BaseException:
        if near is not None:
            near.close()
        raise
    return PairsTransport(to.layout, to, near, far)


def _choose(expert: int, address: str) -> str:
    """The way from here to an expert node. Raises RendezvousError where it is no address of this kind."""
    parts = address.removeprefix("pairs:").split("|")
    if not address.startswith("pairs:") or len(parts) != 3:
        raise RendezvousError(
            f"{member.expert_node(expert)}: {address!r} is not an address of the form pairs:KEY|shm:...|tcp:..."
        )
    key, memory, port = parts
    return memory if key == host_key() else port
