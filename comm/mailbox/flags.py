"""Flag words in shared memory: publish a number after the data is written, notice that it changed, block until it does.

`open_board` gives the native board where the extension is built: acquire and release words, a short busy-poll, then a
futex. Otherwise it gives a plain board, which is slower and relies on a processor that keeps stores in order. Neither
knows what a flag means.
"""

import contextlib
import os
import platform
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from torch import Tensor

from afserve.comm.native import native_library
from afserve.errors import ConfigError
from afserve.kernels.stack import LayeredExperts

_ORDERED = ("x86_64", "AMD64", "i686")
_NAPS = (0.00002, 0.002)  # seconds between looks of the plain board: the first nap and the longest


@dataclass(frozen=True, slots=True)
class LaneWords:
    """Byte offsets in `memory_B` of one lane's 32-bit words: what comes in, what goes out, the peer's bell."""

    memory_B: Tensor
    incoming: int
    outgoing: int
    bell: int


@dataclass(frozen=True, slots=True)
class BellWord:
    """Where peers ring for this node: a counter, and behind it the number of sleepers."""

    memory_B: Tensor
    offset: int

    @property
    def address(self) -> int:
        return self.memory_B.data_ptr() + self.offset


class Board(Protocol):
    """The words of all lanes of one end; a lane is its index. Every lane has a quiet value, first 0."""

    def value(self, lane: int) -> int:
        """The incoming word now; what was written before it is visible afterwards."""

    def settle(self, lane: int, quiet: int) -> None:
        """From now on `changed` means: differs from `quiet`."""

    def post(self, lane: int, value: int) -> None:
        """Write the outgoing word after everything written before, and ring the peer's bell."""

    def changed(self, lanes: Sequence[int]) -> list[int]: ...

    def wait(self, lanes: Sequence[int], timeout: float) -> list[int]:
        """Park until one of `lanes` changed or `timeout` seconds are over."""

    def watch(self, files: int, door: int) -> None:
        """From now on a wait also ends, with nothing, when something is ready in `files`, the number of an epoll.

        Who rings a bell of this end meanwhile knocks at `door`, the number of one of those files.
        """


@runtime_checkable
class MessageBoard(Board, Protocol):
    """A board that also moves whole messages, in one call without the interpreter's lock: the native one.

    A waiter that spins fetches the rows of a message while they are still being written.
    """

    def lend(self, own: int, peer: int) -> None:
        """Bells of two nodes that lend each other their cores (kernels/native/lent_core.h): a wait on `own`, the only
        one of this end, lends this core where it is wanted, and a post that rings `peer` may leave the wake-up to the
        guest there."""

    def carry(
        self, lane: int, out: object, incoming: object, own_slot: int, own_weight: int, sent: int
    ) -> None:
        """The lane's mailboxes (their handles), addresses of memory for slots and weights that come in, or 0, and the
        number sent last: the late answer to a dispatch that was given up is no change any more.
        """

    def send_rows(
        self,
        lane: int,
        number: int,
        epoch: int,
        layer: int,
        rows: int,
        x: int,
        stride: int,
        slot: int,
        weight: int,
    ) -> int:
        """Write and post; `x`, `slot` and `weight` are addresses. Returns the lane's quiet value."""

    def send_split(
        self, lane: int, number: int, epoch: int, layer: int, split: object, weight: int, node: int
    ) -> int:
        """The rows of a native split that go to `node`; `weight` is the address of the split's weights."""

    def take(self, lane: int) -> tuple[bool, int, int, int, int]:
        """(checked and good, sequence number, epoch, layer, rows); the lane is settled either way."""

    def sent(self, lane: int) -> int:
        """The number that was sent last."""

    def taken(self, lane: int) -> int:
        """The number that was taken last."""

    def answer(
        self, experts: LayeredExperts, epochs: list[int], most_rows: list[int], wait: float, serve: float
    ) -> tuple[int, int, int, float, int, int, int, int, float] | None:
        """As `transport.AnsweringLoop`, with a limit of rows for each lane: (lane, messages, rows, seconds) and of the
        last one (sequence number, epoch, layer, rows, seconds)."""


class PlainBoard:
    """Words through memoryviews; parks by napping. Correct where the processor keeps stores in order (x86)."""

    def __init__(self, lanes: Sequence[LaneWords], bells: Sequence[BellWord], *, spins: bool = True) -> None:
        views = {id(lane.memory_B): _words(lane.memory_B) for lane in lanes}
        self._incoming = [(views[id(lane.memory_B)], lane.incoming // 4) for lane in lanes]
        self._outgoing = [(views[id(lane.memory_B)], lane.outgoing // 4) for lane in lanes]
        self._quiet = [0] * len(lanes)
        self._files, self._door = select.poll(), -1

    def value(self, lane: int) -> int:
        words, index = self._incoming[lane]
        return words[index]

    def settle(self, lane: int, quiet: int) -> None:
        self._quiet[lane] = quiet

    def post(self, lane: int, value: int) -> None:
        words, index = self._outgoing[lane]
        words[index] = value

    def changed(self, lanes: Sequence[int]) -> list[int]:
        return [lane for lane in lanes if self.value(lane) != self._quiet[lane]]

    def wait(self, lanes: Sequence[int], timeout: float) -> list[int]:
        deadline = time.monotonic() + timeout
        nap, longest = _NAPS
        while not (found := self.changed(lanes)) and (left := deadline - time.monotonic()) > 0:
            if self._files.poll(1e3 * min(nap, left)):
                self._clear_door()
                return self.changed(lanes)
            nap = min(1.5 * nap, longest)
        return found

    def watch(self, files: int, door: int) -> None:
        self._files.register(files, select.POLLIN)
        self._door = door

    def _clear_door(self) -> None:
        """Nobody but a stranger knocks for an end that never says that it sleeps."""
        with contextlib.suppress(BlockingIOError):
            while True:
                os.read(self._door, 64)


def _words(memory_B: Tensor) -> memoryview:
    return memory_B.numpy().data.cast("B").cast("I")


def open_board(lanes: Sequence[LaneWords], bells: Sequence[BellWord], *, spins: bool = True) -> Board:
    """The fastest board that is correct here. Raises ConfigError where none is.

    It keeps no memory alive: that is the segments' to do. `spins` is whether a wait may spin before it parks: not where
    a thread of this process brings the news.
    """
    native = native_library()
    if native is not None:
        triples = [_addresses(lane) for lane in lanes]
        return cast(Board, native.FlagBoard(triples, [bell.address for bell in bells], spins))
    if platform.machine() not in _ORDERED:
        raise ConfigError(
            f"shared memory between processes on {platform.machine()} needs the native library, which is not built: "
            "install a C++ compiler and reinstall afserve, or use --transport dist"
        )
    return PlainBoard(lanes, bells, spins=spins)


def _addresses(lane: LaneWords) -> tuple[int, int, int]:
    base = lane.memory_B.data_ptr()
    return base + lane.incoming, base + lane.outgoing, base + lane.bell
