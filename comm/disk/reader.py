"""A process that reads files for this one, into memory that both have: a library whose errors end its process is used
so.

Each question has a deadline. Where the process ends, answers late or wrongly, it is killed and never asked again:
`tell` is called once, reads under way raise OSError, and whoever asked reads by itself. The process ends with this one,
however that ends: its socket is closed then. It knows no blocks.
"""

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from afserve.child import module
from afserve.comm.disk.files import File
from afserve.comm.disk.reader_wire import HELLO, HELLO_BYTES, REPLY_BYTES, ReadAsk, ReaderSetup, ReadReply

SECTOR = 512  # reads past the page cache begin and end at a multiple
START_SECONDS, ASK_SECONDS, END_SECONDS = 60.0, 10.0, 2.0
_PROBED_BYTES = 128 << 10
_MOST_WORDS = 300  # characters of what it said last
_HIDDEN = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}  # it reads into host memory, and wants no context


@dataclass(frozen=True, slots=True)
class ReadQueue:
    """`asks` reads at once, each in blocks of `block_bytes`, of which the disk has up to `depth` before it."""

    asks: int
    block_bytes: int
    depth: int

    @property
    def piece_bytes(self) -> int:
        """Of one read, so that all its blocks are before the disk."""
        return self.block_bytes * self.depth


class DiskReader:
    """Reads `files`, which stay open, and whose folder has room for a probe. All calls may come from any thread."""

    def __init__(
        self,
        files: Sequence[File],
        queue: ReadQueue,
        windows: int,
        window_bytes: int,
        command: Sequence[str] = (),
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """It is DeepSpeed that reads, where no other `command` is given. `tell` gets the reason, from a thread. Raises
        OSError."""
        self._files, self.queue, self._tell = list(files), queue, tell
        self._command = command or module("afserve.comm.disk.deepspeed_reader")
        memory = os.memfd_create("afserve-disk")
        try:
            os.ftruncate(memory, windows * window_bytes)
            self._memory = mmap.mmap(memory, windows * window_bytes)
        except BaseException:
            os.close(memory)
            raise
        self._descriptor, self._window_bytes, self._windows = memory, window_bytes, windows
        self._first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._numbers = itertools.count(1)
        self._channels: SimpleQueue[socket.socket] = SimpleQueue()
        self._sockets: list[socket.socket] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._open = [memory]  # descriptors to be closed
        self._is_ready, self._is_told = threading.Event(), threading.Event()
        self._closing, self._failed, self._why = False, False, ""
        self._watch = threading.Thread(target=self._watched, name="disk-reader", daemon=True)

    @property
    def windows(self) -> list[memoryview]:
        size, view = self._window_bytes, memoryview(self._memory)
        return [view[at * size : (at + 1) * size] for at in range(self._windows)]

    def start(self) -> None:
        """Returns at once; it may be asked when it is `ready`."""
        self._watch.start()

    @property
    def ready(self) -> bool:
        return self._is_ready.is_set()

    def wait_ready(self) -> bool:
        """Whether it is, once that is known."""
        self._is_told.wait(START_SECONDS + 2 * ASK_SECONDS)
        return self.ready

    @property
    def cpu_seconds(self) -> float:
        """Of a processor, that it has taken so far; while it is `ready`."""
        assert self._process is not None
        return time.clock_gettime(~self._process.pid << 3 | 2)  # as clock_getcpuclockid(3)

    # ---- reading

    def read_into(self, window: memoryview, file: File, offset: int) -> int:
        """As `File.read_into`; what fills no sector is read here. Raises OSError: then the window must not be used any
        more, since it may still be written to."""
        whole = (
            max(0, min(len(window), file.size_bytes - offset)) // SECTOR * SECTOR
            if offset % SECTOR == 0
            else 0
        )
        if whole:
            self._ask(file.descriptor, offset, window[:whole])
        if whole == len(window):
            return whole
        return whole + file.read_into(window[whole:], offset + whole)

    def _ask(self, descriptor: int, offset: int, window: memoryview) -> None:
        place = ctypes.addressof(ctypes.c_char.from_buffer(window)) - self._first
        ask = ReadAsk(next(self._numbers), descriptor, offset, len(window), place)
        channel = self._channels.get()
        try:
            channel.send(ask.encode())
            if not (raw := channel.recv(REPLY_BYTES + 1)):
                raise ConnectionResetError(errno.ECONNRESET, "it has ended")
            self._check(ask, ReadReply.unpack(raw))
        except TimeoutError:
            self._fail(f"no answer within {ASK_SECONDS:g} s")
            raise
        except ConnectionError:
            self._fail("")
            raise
        except (OSError, ValueError) as error:
            self._fail(str(error))
            raise OSError(errno.EIO, str(error)) from error
        finally:
            self._channels.put(channel)

    @staticmethod
    def _check(ask: ReadAsk, reply: ReadReply) -> None:
        if reply.number != ask.number:
            raise ValueError(f"an answer to question {reply.number} in place of {ask.number}")
        if reply.error:
            raise OSError(f"{ask.size:,} bytes at {ask.offset:,} cannot be read: {os.strerror(reply.error)}")

    def _fail(self, why: str) -> None:
        """An empty reason: what the process says as it ends."""
        self._is_ready.clear()
        self._failed |= not self._closing
        self._why = self._why or why
        if why and self._process is not None:
            self._process.kill()

    # ---- its life

    def _watched(self) -> None:
        try:
            control = self._begun()
            self._is_ready.set()
            self._is_told.set()
            control.settimeout(None)
            with contextlib.suppress(OSError):
                control.recv(1)  # until either side ends
        except (OSError, subprocess.SubprocessError) as error:
            self._why = self._why or ("" if isinstance(error, ConnectionError) else str(error))
        self._is_ready.clear()
        ended = self._reaped()
        if self._failed or not self._closing:
            self._tell(self._why or ended)
        self._is_told.set()

    def _begun(self) -> socket.socket:
        """It has greeted and read what was written. Raises OSError."""
        with tempfile.TemporaryFile(dir=self._files[0].path.parent, buffering=0) as probe:
            size = min(_PROBED_BYTES, self._window_bytes)
            content = os.urandom(size + SECTOR)
            probe.write(content)
            control = self._spawned(probe.fileno())
            if self._closing:
                raise ConnectionAbortedError
            control.settimeout(START_SECONDS)
            try:
                hello = control.recv(HELLO_BYTES)
            except TimeoutError as error:
                raise OSError(f"it has not begun within {START_SECONDS:g} s") from error
            if hello != HELLO:
                raise ConnectionResetError
            window = self.windows[0][:size]
            window[:] = bytes(size)
            self._ask(probe.fileno(), SECTOR, window)  # from a sector that begins no page, as blocks may
            if window != content[SECTOR:]:
                raise OSError("what it read is not what stands in the file")
        return control

    def _spawned(self, probe: int) -> socket.socket:
        pairs = [socket.socketpair(type=socket.SOCK_SEQPACKET) for _ in range(self.queue.asks + 1)]
        self._sockets = [ours for ours, _ in pairs]
        self._log = os.memfd_create("afserve-reader")
        self._open.append(self._log)
        theirs = [one.fileno() for _, one in pairs]
        files = (*(file.descriptor for file in self._files), probe)
        setup = ReaderSetup(
            theirs[0], self._descriptor, self._windows, self._window_bytes,
            self.queue.block_bytes, self.queue.depth, tuple(theirs[1:]), files,
        )  # fmt: skip
        try:
            self._process = subprocess.Popen(
                [*self._command, *setup.words()], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                pass_fds=(*theirs, self._descriptor, *files), start_new_session=True, env={**os.environ, **_HIDDEN},
            )  # fmt: skip
        finally:
            for _, one in pairs:
                one.close()
        for channel in self._sockets[1:]:
            channel.settimeout(ASK_SECONDS)
            self._channels.put(channel)
        return self._sockets[0]

    def _reaped(self) -> str:
        """How it ended, and what it said last."""
        if self._process is None:
            return ""
        if self._closing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        elif not self._why:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS / 2)
        self._process.kill()
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"process {self._process.pid} does not end"
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"its process {how}: {said}" if (said := self._last_words()) else f"its process {how}"

    def _last_words(self) -> str:
        size = os.fstat(self._log).st_size
        said = os.pread(self._log, 4096, max(0, size - 4096)).decode(errors="replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return lines[-1][:_MOST_WORDS] if lines else ""

    def close(self) -> None:
        """Reads under way fail. May be said again. Memory stays as long as somebody has windows."""
        self._closing = True
        self._is_ready.clear()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if self._watch.is_alive():
            self._watch.join(START_SECONDS)
        for one in self._sockets:
            one.close()
        for descriptor in self._open:
            os.close(descriptor)
        self._sockets, self._open = [], []
