"""What a node and the process that reads for it say to each other: structs of a fixed size, one for each message.

They go through pairs of sockets that keep messages apart. It starts nothing and reads nothing.
"""

import struct
from dataclasses import dataclass

_ASK = struct.Struct(
    "<QqQQQ"
)  # number, descriptor, offset in the file, bytes, place in the memory that both have
_REPLY = struct.Struct("<Qq")  # number, the system's number of an error or 0
_HELLO = struct.Struct("<8sQ")  # magic, version
_MAGIC, _VERSION = b"afserve\n", 1
HELLO = _HELLO.pack(_MAGIC, _VERSION)
ASK_BYTES, REPLY_BYTES, HELLO_BYTES = _ASK.size, _REPLY.size, _HELLO.size


@dataclass(frozen=True, slots=True)
class ReadAsk:
    """Fill `size` bytes of memory from `place` on with those of a file from `offset` on. Both processes have the file
    under the same `descriptor`."""

    number: int
    descriptor: int
    offset: int
    size: int
    place: int

    def encode(self) -> bytes:
        return _ASK.pack(self.number, self.descriptor, self.offset, self.size, self.place)

    @classmethod
    def unpack(cls, raw: bytes) -> "ReadAsk":
        return cls(*_ASK.unpack(raw))


@dataclass(frozen=True, slots=True)
class ReadReply:
    """`error` is 0 where all bytes are there."""

    number: int
    error: int

    def encode(self) -> bytes:
        return _REPLY.pack(self.number, self.error)

    @classmethod
    def unpack(cls, raw: bytes) -> "ReadReply":
        """Raises ValueError."""
        if len(raw) != REPLY_BYTES:
            raise ValueError(f"an answer of {len(raw)} bytes in place of {REPLY_BYTES}")
        return cls(*_REPLY.unpack(raw))


@dataclass(frozen=True, slots=True)
class ReaderSetup:
    """What the process is started with: descriptors that it inherits, and how it reads. It goes through the command
    line as numbers. `memory` has `windows` of `window_bytes`; each of `channels` is asked for one read at a time."""

    control: int
    memory: int
    windows: int
    window_bytes: int
    block_bytes: int
    depth: int
    channels: tuple[int, ...]
    files: tuple[int, ...]

    def words(self) -> list[str]:
        numbers = (self.control, self.memory, self.windows, self.window_bytes, self.block_bytes, self.depth)
        return [",".join(map(str, part)) for part in (numbers, self.channels, self.files)]

    @classmethod
    def parse(cls, words: list[str]) -> "ReaderSetup":
        numbers, channels, files = (tuple(map(int, word.split(","))) for word in words)
        control, memory, windows, window_bytes, block_bytes, depth = numbers
        return cls(control, memory, windows, window_bytes, block_bytes, depth, channels, files)
