"""The inside of a process that reads files for a node: it answers until the node ends, and then ends too.

How it reads is a `FileBackend`. Whatever kills it kills no node. It knows no blocks, and trusts no message.
"""

import errno
import os
import socket
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Protocol

from afserve.comm.disk.reader_wire import ASK_BYTES, HELLO, ReadAsk, ReaderSetup, ReadReply


class FileBackend(Protocol):
    def read(self, channel: int, ask: ReadAsk) -> None:
        """Called by one thread for each channel. Raises OSError."""


def serve(open_backend: Callable[[ReaderSetup], FileBackend], words: list[str]) -> NoReturn:
    """`words` are those of `ReaderSetup`. What goes wrong is said on standard error; the node repeats its last line."""
    sys.excepthook = _fails
    setup = ReaderSetup.parse(words)
    control = socket.socket(fileno=setup.control)
    threading.excepthook = _ends
    channels = [socket.socket(fileno=descriptor) for descriptor in setup.channels]
    backend = open_backend(setup)
    for number, channel in enumerate(channels):
        threading.Thread(target=_answer, args=(setup, backend, number, channel), daemon=True).start()
    control.send(HELLO)
    control.recv(1)  # it gives nothing until the node has ended, or wants this to end
    os._exit(0)  # also where a read does not come back


def _answer(setup: ReaderSetup, backend: FileBackend, number: int, channel: socket.socket) -> None:
    try:
        while len(raw := channel.recv(ASK_BYTES)) == ASK_BYTES:
            ask, error = ReadAsk.unpack(raw), 0
            try:
                _check(setup, ask)
                backend.read(number, ask)
            except OSError as failed:
                error = failed.errno or errno.EIO
            channel.send(ReadReply(ask.number, error).encode())
    except ConnectionError:
        pass
    os._exit(0)  # the node has ended


def _ends(failed: threading.ExceptHookArgs) -> None:
    """A channel without its thread would never answer."""
    _fails(failed.exc_type, failed.exc_value, failed.exc_traceback)


def _fails(
    kind: type[BaseException], value: BaseException | None, traceback: TracebackType | None
) -> NoReturn:
    """At once: an interpreter that has imported torch takes its time to end."""
    print(f"{kind.__name__}: {value}", file=sys.stderr, flush=True)
    os._exit(1)


def _check(setup: ReaderSetup, ask: ReadAsk) -> None:
    """A read stays in one window, of a file that was handed over."""
    window, begin = divmod(ask.place, setup.window_bytes)
    fits = 0 < ask.size <= setup.window_bytes - begin and 0 <= window < setup.windows
    if not fits or ask.offset < 0 or ask.descriptor not in setup.files:
        raise OSError(errno.EINVAL, f"{ask} is outside of what this process has")
