"""Standard output and error that nobody can make fail: a full disk, a pipe whose reader has gone, a closed descriptor.

What a server prints is for whoever looks; whether it serves does not depend on it.
"""

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Tolerant(io.RawIOBase):
    """Writes to a descriptor; what it does not take is gone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return memoryview(data).nbytes


def tolerate_lost_output() -> None:
    """From now on nothing that this process, or one that is forked from it, prints can fail. May be called again."""
    _occupy()
    sys.stdout = _over(1, sys.stdout)
    sys.stderr = _over(2, sys.stderr)


def _occupy() -> None:
    """A descriptor that was closed would be the next socket's, and what is printed there its peer's."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)


def _over(descriptor: int, stream: TextIO | None) -> TextIO:
    if stream is not None and _number(stream) != descriptor:
        return stream  # somebody has put another one there, such as a test
    if isinstance(stream, io.TextIOWrapper) and isinstance(getattr(stream.buffer, "raw", None), _Tolerant):
        return stream
    encoding = "utf-8" if stream is None else stream.encoding
    return io.TextIOWrapper(
        io.BufferedWriter(_Tolerant(descriptor)), encoding, errors="backslashreplace", line_buffering=True
    )


def _number(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None
