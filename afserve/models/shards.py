"""Which file of a checkpoint folder holds which tensor, and where in it: indexes and headers, without torch.

A safetensors file is 8 bytes of header length (little-endian), a JSON header, then the tensors' bytes; GGUF files have
the header of `afserve/gguf/header.py`. Whatever a file says of itself is checked against its size before it is used.
What the tensors are for is not known here.
"""

import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from afserve.comm.disk.files import File
from afserve.errors import CheckpointError, shown
from afserve.gguf.header import MAGIC, GgufHeader, TensorRow, read_header
from afserve.json_file import LIST_BYTES, parse, read_object

INDEX = "model.safetensors.index.json"
GGUF_INDEX = "model.gguf.index.json"  # of a folder whose tensors lie in GGUF files
SINGLE = "model.safetensors"
MOST_HEADER = 100_000_000  # the safetensors library's own limit
PAGE = 4096
_PIECE = 512 << 10  # of a read past the page cache
MOST_NAME = 255  # bytes, as Linux has it
_LENGTH = 8
_BITS = {  # of a number, by the names that the safetensors library has
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file; `begin` and `end` count from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_index(folder: Path) -> Mapping[str, str] | None:
    """Tensor name -> file name; None where the folder has no index. Raises CheckpointError."""
    index = next((found for name in (INDEX, GGUF_INDEX) if (found := folder / name).is_file()), None)
    if index is None:
        return None
    weight_map = read_object(index, LIST_BYTES, once=True).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: not an index: weight_map: {shown(weight_map)} is not an object")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_plain_name(file):
            raise CheckpointError(
                f"{index}: weight_map sends {shown(name)} to {shown(file)}, which is not a plain file name"
            )
    return weight_map


def located(folder: Path, names: Callable[[str], Collection[str]]) -> Mapping[str, str]:
    """Tensor name -> file name, from the index or from the one file, whose `names` are asked for. Raises
    CheckpointError."""
    listed = read_index(folder)
    if listed is not None:
        return listed
    if not (folder / SINGLE).is_file():
        others = sorted(p.name for p in folder.glob("*.bin")) if folder.is_dir() else []
        hint = f"; {others[0]} is not read, because afserve loads safetensors only" if others else ""
        raise CheckpointError(f"{folder}: no {SINGLE} and no {INDEX}{hint}")
    return dict.fromkeys(names(SINGLE), SINGLE)


def stored_names(folder: Path) -> Collection[str]:
    """Of all tensors of a checkpoint. Raises CheckpointError."""
    index = read_index(folder)
    if index is not None:
        return index.keys()
    with ShardFile(folder / SINGLE) as file:
        return [row.name for row in file.tensors()]


def stored_shapes(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """The same with their shapes."""
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted(set((read_index(folder) or {"": SINGLE}).values())):
        with ShardFile(folder / name) as file:
            found |= {row.name: row.shape for row in file.tensors()}
    return found


def is_plain_name(name: str) -> bool:
    """Whether it names a file of the folder itself, as every file system takes it."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:  # half a pair of surrogates
        return False
    return 0 < len(encoded) <= MOST_NAME and name != ".." and "\0" not in name and Path(name).name == name


class ShardFile:
    """A safetensors file, or any other, while it is read; `with` closes it. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> "ShardFile":
        self.open()
        return self

    def open(self, *, past_cache: bool = False) -> None:
        """A FIFO in its place keeps nobody waiting. `past_cache` is for `read_around`."""
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be read: {error.strerror}; download it again"
            ) from error
        self.found = os.fstat(self._descriptor)
        if not stat.S_ISREG(self.found.st_mode):
            os.close(self._descriptor)
            raise CheckpointError(f"{self.path}: is not a plain file")
        self._past = self._opened_past_cache() if past_cache and hasattr(os, "O_DIRECT") else None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)
        if self._past is not None:
            self._past.close()

    def _opened_past_cache(self) -> File:
        """The same file, whoever has its name now."""
        with self._told():
            return File(Path(f"/proc/self/fd/{self._descriptor}"), direct=True, writes=False)

    def gguf_header(self) -> GgufHeader:
        header = read_header(self.read, self.found.st_size, str(self.path))
        self._check_apart(header.tensors)
        return header

    def tensors(self) -> list[StoredTensor]:
        """All of the header, by name."""
        size = self.found.st_size
        if size >= len(MAGIC) and self.read(len(MAGIC), 0) == MAGIC:
            found = self.gguf_header().tensors
            made = (StoredTensor(row.name, row.kind.name, row.shape, row.begin, row.end) for row in found)
            return sorted(made, key=lambda row: row.name)
        length = int.from_bytes(self.read(_LENGTH, 0), "little")
        if length > min(MOST_HEADER, size - _LENGTH):
            raise self._broken(f"its header would have {length:,} bytes, the file has {size:,}")
        try:
            text = self.read(length, _LENGTH).decode()
        except UnicodeDecodeError as error:
            raise self._broken("its header is not UTF-8 text") from error
        entries = parse(text, f"{self.path}: the header", once=True)
        if not isinstance(entries, dict):
            raise self._broken(f"its header is {shown(entries)}")
        rows = [
            self._stored(n, entry, _LENGTH + length) for n, entry in entries.items() if n != "__metadata__"
        ]
        self._check_apart(rows)
        return sorted(rows, key=lambda row: row.name)

    def read(self, count: int, offset: int) -> bytes:
        """Exactly `count` bytes, or a refusal where the file ends before, also when it was cut meanwhile."""
        pieces, done = [], 0
        with self._told():
            while done < count and (more := os.pread(self._descriptor, count - done, offset + done)):
                pieces.append(more)
                done += len(more)
        self._check_all(done, count, offset)
        return b"".join(pieces)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """As `read`."""
        done = 0
        with self._told():
            while done < len(buffer) and (
                more := os.preadv(self._descriptor, [buffer[done:]], offset + done)
            ):
                done += more
        self._check_all(done, len(buffer), offset)

    def read_apart(self, parts: Sequence[tuple[memoryview, int]]) -> None:
        """As `read_into`, of several places: a disk is told of all before the first is waited for."""
        with self._told():
            for buffer, offset in parts:
                os.posix_fadvise(self._descriptor, offset, len(buffer), os.POSIX_FADV_WILLNEED)
        for buffer, offset in parts:
            self.read_into(buffer, offset)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _check_all(self, done: int, count: int, offset: int) -> None:
        if done < count:
            raise self._broken(f"it ends at byte {offset + done:,}, {offset + count:,} are needed")

    def read_around(
        self, pages: memoryview, begin: int, end: int, readers: Executor | None
    ) -> Callable[[], int]:
        """As `read`, into memory that begins at a page and is two pages longer than what is asked for: what waits for
        it, and says where in it that begins. Past the page cache `readers` begin at once, in pieces of whole pages."""
        past = self._past
        if past is None or readers is None:
            return partial(self._read_at_once, pages[: end - begin], begin)
        ahead = begin % PAGE
        first, size = begin - ahead, -(-(end - begin + ahead) // PAGE) * PAGE
        starts = range(0, size, _PIECE)
        ends = [pages[at : min(at + _PIECE, size)] for at in starts]
        counts = readers.map(past.read_into, ends, [first + at for at in starts])

        def wait() -> int:
            with self._told():
                done = sum(counts)
                if not past.direct:
                    os.posix_fadvise(self._descriptor, first, size, os.POSIX_FADV_DONTNEED)
            self._check_all(done - ahead, end - begin, begin)
            return ahead

        return wait

    def _read_at_once(self, buffer: memoryview, begin: int) -> int:
        self.read_into(buffer, begin)
        return 0

    @property
    def changed_on_disk(self) -> bool:
        """Whether it was written to since it was opened; another file under its name is no matter."""
        try:
            now = os.fstat(self._descriptor)
        except OSError:  # of a network's file that is gone
            return True
        return (now.st_size, now.st_mtime_ns) != (self.found.st_size, self.found.st_mtime_ns)

    def check_unchanged(self) -> None:
        if self.changed_on_disk:
            raise CheckpointError(
                f"{self.path}: was written to while it was read; start again when it is whole"
            )

    def _stored(self, name: str, entry: object, first: int) -> StoredTensor:
        """Offsets in the header count from its end."""
        fields = entry if isinstance(entry, dict) else {}
        dtype, space = fields.get("dtype"), self.found.st_size - first
        shape, offsets = _whole_numbers(fields.get("shape")), _whole_numbers(fields.get("data_offsets"))
        if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
            raise self._broken(f"tensor {shown(name)} is {shown(entry)}")
        begin, end = offsets
        if not begin <= end <= space:
            raise self._broken(f"tensor {shown(name)} lies at {shown(offsets)} of {space:,} bytes")
        bits = _BITS.get(dtype)
        if bits is None:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)} has dtype {shown(dtype)}, which is not known"
            )
        if _count(shape, space * 8) * bits != (end - begin) * 8:
            raise self._broken(
                f"tensor {shown(name)}: {end - begin:,} bytes are not {dtype} {shown(list(shape))}"
            )
        return StoredTensor(name, dtype, shape, first + begin, first + end)

    def _check_apart(self, rows: Sequence[StoredTensor | TensorRow]) -> None:
        """No two tensors in the same bytes."""
        placed = sorted((row for row in rows if row.begin < row.end), key=lambda row: row.begin)
        for one, next_one in pairwise(placed):
            if next_one.begin < one.end:
                raise self._broken(
                    f"tensors {shown(one.name)} and {shown(next_one.name)} lie in the same bytes"
                )

    def _broken(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: not a whole safetensors file: {why}; download it again")


def _count(shape: tuple[int, ...], most: int) -> int:
    """How many numbers it has, or some number above `most`: a shape that lies costs no long multiplication."""
    count = 0 if 0 in shape else 1
    for extent in shape:
        count *= extent
        if count > most:
            break
    return count


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None
