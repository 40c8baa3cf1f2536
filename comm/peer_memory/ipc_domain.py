"""Two processes of a host that each map memory of the other, handed over on the Unix socket that they have greeted on.

    both    magic, driver, bytes, bytes that were made, and the descriptor with it (none where none could be made)
    both    0, or 1 and why this end cannot go on

So both know in time that both have both, or why not. All of it has one deadline. It knows no mailboxes.
"""

import array
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import Tensor

from afserve.comm.peer_memory.driver import Made, MemoryDriver, MemoryRefused

_OFFER = struct.Struct("<8s8sQQ")
_MAGIC = b"afs-mem1"
_VERDICT = struct.Struct("<BH")
_LONGEST_REASON = 400
_SPARE = 1 << 30  # bytes that a driver may make beyond those asked for
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Shared:
    """The same number of bytes at two nodes, each of which reads and writes both."""

    mine_B: Tensor
    theirs_B: Tensor


class IpcDomain:
    """Memory of one driver. Ends of two drivers do not match."""

    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver

    def share(self, connection: socket.socket, size: int, seconds: float) -> Shared:
        """Zeros at first. Blocks until the other end of `connection` does the same. Raises MemoryRefused saying what
        is wrong: it came late, hung up, is no such end, or one of both could not map the other's memory."""
        line = _Line(connection, seconds)
        try:
            made = self._driver.make(size)
        except MemoryRefused as error:
            line.send_offer(self._driver.name, size, None)
            line.send_refusal(str(error))
            raise
        try:
            line.send_offer(self._driver.name, size, made)
        finally:
            os.close(made.file)
        theirs_B = self._open(line, size)
        line.send_consent()
        line.read_verdict()
        return Shared(made.memory_B, theirs_B)

    def _open(self, line: "_Line", size: int) -> Tensor:
        name, there, whole, file = line.read_offer()
        try:
            if name != self._driver.name or there != size:
                raise MemoryRefused(
                    f"it shares {there} bytes of {name} memory and this end {size} of {self._driver.name}"
                )
            if file is None:
                line.read_verdict()
                raise MemoryRefused("no memory came with its offer; may this process open no more files?")
            if not size <= whole <= size + _SPARE:
                raise MemoryRefused(f"it says that it made {whole} bytes of memory where {size} are shared")
            return self._driver.open(file, size, whole)
        except MemoryRefused as error:
            line.send_refusal(str(error))
            raise
        finally:
            if file is not None:
                os.close(file)


class _Line:
    """One connection under one deadline. Everything that fails there is MemoryRefused."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._seconds = connection, seconds
        self._until = time.monotonic() + seconds

    def send_offer(self, name: str, size: int, made: Made | None) -> None:
        head = _OFFER.pack(_MAGIC, name.encode(), size, made.whole if made else 0)
        files = array.array("i", [made.file] if made else [])
        with_it = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)] if made else []
        self._try(lambda: self._connection.sendmsg([head], with_it))

    def read_offer(self) -> tuple[str, int, int, int | None]:
        """(driver, bytes, bytes made, descriptor)"""
        head, files = b"", list[int]()
        try:
            while len(head) < _OFFER.size:
                rest = _OFFER.size - len(head)
                part, more, _, _ = self._try(
                    partial(socket.recv_fds, self._connection, rest, 4, socket.MSG_CMSG_CLOEXEC)
                )
                files += more
                head += _something(part)
            magic, name, size, whole = _OFFER.unpack(head)
            if magic != _MAGIC:
                raise MemoryRefused(f"it says {magic!r} in place of an offer of memory")
        except MemoryRefused:
            _close(files)
            raise
        _close(files[1:])
        return name.rstrip(b"\0").decode("latin-1"), size, whole, files[0] if files else None

    def send_consent(self) -> None:
        self._try(lambda: self._connection.sendall(_VERDICT.pack(0, 0)))

    def send_refusal(self, why: str) -> None:
        """Where it can still be said: whoever refuses has its own reason already."""
        text = why.encode()[:_LONGEST_REASON]
        try:
            self._connection.settimeout(max(0.01, self._until - time.monotonic()))
            self._connection.sendall(_VERDICT.pack(1, len(text)) + text)
        except OSError:
            return

    def read_verdict(self) -> None:
        refused, length = _VERDICT.unpack(self._read(_VERDICT.size))
        if refused:
            text = self._read(min(length, _LONGEST_REASON)).decode(errors="replace")
            raise MemoryRefused(f"the other end cannot go on: {text}")

    def _read(self, count: int) -> bytes:
        raw = b""
        while len(raw) < count:
            raw += _something(self._try(partial(self._connection.recv, count - len(raw))))
        return raw

    def _try(self, step: Callable[[], _T]) -> _T:
        left = self._until - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            return step()
        except TimeoutError as error:
            raise MemoryRefused(
                f"it did not share its memory within {self._seconds:g} s; is it stopped, or very busy?"
            ) from error
        except OSError as error:
            raise MemoryRefused(f"its connection has ended ({error.strerror or error})") from error


def _something(part: bytes) -> bytes:
    if not part:
        raise MemoryRefused("it hung up before both had each other's memory")
    return part


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
