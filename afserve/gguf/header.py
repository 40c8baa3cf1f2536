"""The header of a GGUF file: metadata by key, and which tensor lies where. Without torch.

A file is its magic, version 2 or 3, both counts, the metadata, the tensors' rows, and the tensors' bytes from the next
multiple of `general.alignment` on (docs/gguf.md of ggml). Whatever it says of itself is checked against its size before
memory is taken for it. What keys and tensors mean is not known here.
"""

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Union

from afserve.errors import CheckpointError, shown
from afserve.gguf.kinds import KINDS, GgmlType

MAGIC = b"GGUF"
MOST_HEADER = 256 << 20  # bytes: a vocabulary of a million tokens with its merges has 50 MB
MOST_KEYS, MOST_TENSORS, MOST_ITEMS = 1 << 12, 1 << 17, 1 << 22
_MOST_KEY = 1 << 16  # bytes
_MOST_DIMENSIONS = 4
_MOST_ALIGNMENT = 1 << 20
_PIECE = 1 << 20
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
Value = Union[str, int, float, bool, "array[int]", "array[float]", list[str]]
Read = Callable[[int, int], bytes]
"""Exactly so many bytes from an offset on, or a refusal."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """`shape` as torch has it, the outermost dimension first; `begin` and `end` count from the file's first byte."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: Mapping[str, Value]
    tensors: Sequence[TensorRow]


def read_header(read: Read, size: int, where: str) -> GgufHeader:
    """Of a file of `size` bytes. Raises CheckpointError that begins with `where`."""
    cursor = _Cursor(read, size, where)
    if cursor.bytes(4) != MAGIC:
        cursor.broken("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        cursor.broken(f"it is of version {version}; 2 and 3 are read, of machines with the lowest byte first")
    tensors = cursor.bounded("tensors", MOST_TENSORS)
    keys = cursor.bounded("keys of metadata", MOST_KEYS)
    metadata: dict[str, Value] = {}
    for _ in range(keys):
        key = cursor.string(_MOST_KEY)
        if key in metadata:
            cursor.broken(f"the key {shown(key)} is there twice")
        metadata[key] = cursor.value(key)
    rows = [cursor.declared() for _ in range(tensors)]
    return GgufHeader(metadata, _placed(cursor, metadata, rows))


@dataclass(frozen=True, slots=True)
class _Declared:
    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    offset: int
    size: int


def _placed(
    cursor: "_Cursor", metadata: Mapping[str, Value], rows: Sequence[_Declared]
) -> tuple[TensorRow, ...]:
    """Offsets count from the end of the header, rounded up."""
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or not 0 < align <= _MOST_ALIGNMENT or align & (align - 1):
        cursor.broken(f"general.alignment: {shown(align)} is not a power of two up to {_MOST_ALIGNMENT:,}")
    first = -(-cursor.at // align) * align
    made, names = [], set()
    for row in rows:
        begin = first + row.offset
        if row.offset % align:
            cursor.broken(
                f"tensor {shown(row.name)} lies at {row.offset:,}, which is no multiple of {align:,}"
            )
        if begin + row.size > cursor.size:
            cursor.broken(
                f"tensor {shown(row.name)} would end at byte {begin + row.size:,}, the file has {cursor.size:,}"
            )
        if row.name in names:
            cursor.broken(f"tensor {shown(row.name)} is there twice")
        names.add(row.name)
        made.append(TensorRow(row.name, row.kind, row.shape, begin, begin + row.size))
    return tuple(made)


class _Cursor:
    """Where in the file the next value begins. It reads a piece of the file at a time."""

    def __init__(self, read: Read, size: int, where: str) -> None:
        self.size, self._where = size, where
        self._read, self._most = read, min(size, MOST_HEADER)
        self._first, self._piece = 0, b""
        self.at = 0

    def broken(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self._where}: not a whole GGUF file: {why}; download it again")

    def bytes(self, count: int) -> bytes:
        begin = self.at - self._first
        if begin + count > len(self._piece):
            if self.at + count > self._most:
                self._beyond(count)
            self._first = self.at
            self._piece = self._read(max(count, min(_PIECE, self._most - self.at)), self.at)
            begin = 0
        self.at += count
        return self._piece[begin : begin + count]

    def _beyond(self, count: int) -> NoReturn:
        limit = "the file has" if self._most == self.size else "headers have at most"
        self.broken(f"its header would go on to byte {self.at + count:,}, {limit} {self._most:,}")

    def number(self, code: str) -> int:
        form = f"<{code}"
        return int(struct.unpack(form, self.bytes(struct.calcsize(form)))[0])

    def bounded(self, what: str, most: int) -> int:
        found = self.number("Q")
        if found > most:
            self.broken(f"it would have {found:,} {what}, at most {most:,} are read")
        return found

    def string(self, most: int = MOST_HEADER) -> str:
        length = self.number("Q")
        if length > most:
            self.broken(f"a text at byte {self.at:,} would have {length:,} bytes")
        try:
            return self.bytes(length).decode()
        except UnicodeDecodeError:
            self.broken(f"the text before byte {self.at:,} is not UTF-8")

    def value(self, key: str) -> Value:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        return self._plain(key, kind)

    def _plain(self, key: str, kind: int) -> int | float | bool:
        form = f"<{self._code(key, kind)}"
        found: int | float = struct.unpack(form, self.bytes(struct.calcsize(form)))[0]
        if kind == _BOOL and found not in (0, 1):
            self.broken(f"{shown(key)} is neither true nor false")
        return bool(found) if kind == _BOOL else found

    def _code(self, key: str, kind: int) -> str:
        if kind not in _NUMBERS:
            self.broken(f"{shown(key)} is of a type {kind} that is not known")
        return _NUMBERS[kind]

    def _array(self, key: str) -> Value:
        kind, count = self.number("I"), self.number("Q")
        if count > MOST_ITEMS:
            self.broken(f"{shown(key)} would have {count:,} items, at most {MOST_ITEMS:,} are read")
        if kind == _STRING:
            if self.at + 8 * count > self._most:
                self._beyond(8 * count)
            return self._strings(count)
        items = array(self._code(key, kind))
        items.frombytes(self.bytes(count * items.itemsize))
        return items

    def _strings(self, count: int) -> list[str]:
        """As `string`, of which a vocabulary has hundreds of thousands."""
        found = []
        piece, at = self._piece, self.at - self._first
        for _ in range(count):
            begin = at + 8
            at = begin + int.from_bytes(piece[at:begin], "little")
            if at > len(piece) or begin > len(piece):
                found.append(self.string())
                piece, at = self._piece, self.at - self._first
                continue
            try:
                found.append(piece[begin:at].decode())
            except UnicodeDecodeError:
                self.broken(f"the text before byte {self._first + at:,} is not UTF-8")
            self.at = self._first + at
        return found

    def declared(self) -> _Declared:
        name, dimensions = self.string(_MOST_KEY), self.number("I")
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            self.broken(f"tensor {shown(name)} has {dimensions:,} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        number, offset = self.number("I"), self.number("Q")
        kind = KINDS.get(number)
        if kind is None:
            raise CheckpointError(
                f"{self._where}: tensor {shown(name)} is of ggml's type {number}, which afserve does not read; it "
                f"reads {', '.join(kind.name for kind in KINDS.values())}"
            )
        count = 1
        for extent in shape:
            count *= extent
            if not extent or count > 8 * self.size * kind.numbers:
                self.broken(
                    f"tensor {shown(name)} of shape {shown(list(shape))} does not fit {self.size:,} bytes"
                )
        if shape[-1] % kind.numbers:
            self.broken(
                f"tensor {shown(name)} has rows of {shape[-1]:,} numbers, {kind.name} has blocks of {kind.numbers}"
            )
        return _Declared(name, kind, shape, offset, kind.row_bytes(count))
