"""Tensors as the safetensors files of a folder store them, each read into memory of its own.

Nothing is mapped: a mapped file that is cut ends every process that looks at what is no longer there (SIGBUS). A file
is read by the descriptor that it was opened with, so that its name may go. One that was written to since is opened
anew, and read only where `recheck` says that the folder has what it had. Which file has which tensor is the caller's
business.
"""

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from afserve.errors import CheckpointError
from afserve.gguf.kinds import PACKED
from afserve.models.shards import PAGE, ShardFile, StoredTensor

_PIECES = 16  # of tensors, that are read at once: what a disk's own rate takes
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

Extent = tuple[int, int]  # bytes of a file
Begun = Callable[[], Tensor]  # waits for what is being read


class TensorFiles:
    """Several threads may read at once. Each call raises CheckpointError for what cannot be read."""

    def __init__(self, folder: Path, *, past_cache: bool = False) -> None:
        """`past_cache`: reads go past the page cache where the file system can do that, else leave nothing there."""
        self._pieces = ThreadPoolExecutor(_PIECES, "tensor-reader") if past_cache else None
        self.bytes_read = 0
        self.recheck: Callable[[], bool] = lambda: False  # whether the folder still has what was read first
        self._folder = folder
        self._open: dict[str, _Shard] = {}
        self._refused: dict[
            str, tuple[object, CheckpointError]
        ] = {}  # what a file was when it was refused, and why
        self._guard = threading.Lock()

    def names(self, file: str) -> Collection[str]:
        return self._shard(file).stored.keys()

    def tensor(self, file: str, name: str) -> Tensor:
        shard = self._shard(file)
        stored = shard.found(name)
        return self._read(shard, stored, stored.begin, stored.end, stored.shape)

    @contextmanager
    def together(self, asked: Sequence[tuple[str, str, int | None]]) -> Iterator[None]:
        """`tensor` of file and name, or `rows` of one row, will be called for each within: where reads go past the page
        cache, all have begun. What nobody calls for is dropped."""
        begun: list[tuple[_Shard, Extent, Begun]] = []
        try:
            for file, name, row in asked if self._pieces is not None else ():
                shard = self._shard(file)
                stored = shard.found(name)
                if row is not None and not row < next(iter(stored.shape), 0):
                    continue  # whoever asks for it is told
                extent = (stored.begin, stored.end) if row is None else _extent(stored, row, 1)
                wait = shard.begun[extent] = shard.reading(stored, *extent)
                begun.append((shard, extent, wait))
            yield
        finally:
            for shard, extent, wait in begun:
                if shard.begun.get(extent) is wait:
                    del shard.begun[extent]

    def shape(self, file: str, name: str) -> tuple[int, ...]:
        return self._shard(file).found(name).shape

    def kind(self, file: str, name: str) -> str:
        """Its dtype, as the file calls it; a tensor of blocks is read as their bytes, row by row."""
        return self._shard(file).found(name).dtype

    def rows(self, file: str, name: str, first: int, count: int) -> Tensor:
        """A part of the first dimension; of the rest nothing is read."""
        shard = self._shard(file)
        stored = shard.found(name)
        begin, end = _extent(stored, first, count)
        return self._read(shard, stored, begin, end, (count, *stored.shape[1:]))

    def picked(self, file: str, name: str, numbers: Sequence[int]) -> Tensor:
        """Those rows of the first dimension, through the page cache; all are asked of the disk before any is waited
        for."""
        shard = self._shard(file)
        stored = shard.found(name)
        assert numbers and min(numbers) >= 0 and max(numbers) < stored.shape[0], f"{name}: rows {numbers}"
        read = shard.picked(stored, numbers)
        with self._guard:
            self.bytes_read += read.nbytes
        return read

    def _read(
        self, shard: "_Shard", stored: StoredTensor, begin: int, end: int, shape: tuple[int, ...]
    ) -> Tensor:
        read = shard.read(stored, begin, end, shape)
        with self._guard:
            self.bytes_read += end - begin
        return read

    def _shard(self, file: str) -> "_Shard":
        with self._guard:
            shard = self._open.get(file)
            if shard is None or shard.file.changed_on_disk:
                shard = self._open[file] = self._opened(file, anew=shard is not None)
            return shard

    def _opened(self, file: str, *, anew: bool) -> "_Shard":
        path = self._folder / file
        if not anew:
            return _Shard(_there(path), self._pieces)
        state, refused = _state(path), self._refused.get(file)
        if refused is not None and refused[0] == state:
            raise refused[1]  # thousands of tensors may be asked for
        try:
            if not self.recheck():
                raise CheckpointError(
                    f"{path}: was written to since this process began to read it, and is another file now; put the "
                    "file back that the run began with"
                )
            return _Shard(_there(path), self._pieces)
        except CheckpointError as error:
            self._refused[file] = state, error
            raise


class _Shard:
    """One open file and its header; it is closed with the last reference."""

    def __init__(self, path: Path, pieces: ThreadPoolExecutor | None) -> None:
        """`pieces` read past the page cache. `begun`: reads that somebody will call for."""
        self.file, self._pieces = ShardFile(path), pieces
        self.begun: dict[Extent, Begun] = {}
        self.file.open(past_cache=pieces is not None)
        weakref.finalize(self, self.file.close)
        self.stored: dict[str, StoredTensor] = {row.name: row for row in self.file.tensors()}

    def found(self, name: str) -> StoredTensor:
        stored = self.stored.get(name)
        if stored is None:
            raise CheckpointError(f"{self.file.path}: {name} cannot be read: the file has no such tensor")
        return stored

    def _dtype(self, stored: StoredTensor) -> torch.dtype:
        if stored.dtype not in _DTYPES:
            raise CheckpointError(
                f"{self.file.path}: {stored.name} has dtype {stored.dtype}, which afserve cannot serve"
            )
        return _DTYPES[stored.dtype]

    def picked(self, stored: StoredTensor, numbers: Sequence[int]) -> Tensor:
        dtype, size = self._dtype(stored), (stored.end - stored.begin) // stored.shape[0]
        room_IB = torch.empty((len(numbers), size), dtype=torch.uint8)
        rows = zip(room_IB.numpy(), [stored.begin + number * size for number in numbers], strict=True)
        try:
            self.file.read_apart([(row.data, offset) for row, offset in rows])
            self.file.check_unchanged()
        except CheckpointError as error:
            raise CheckpointError(f"{error.message} ({stored.name})") from error
        return room_IB.view(dtype).view(len(numbers), *stored.shape[1:])

    def reading(self, stored: StoredTensor, begin: int, end: int) -> "Begun":
        """Its bytes, which are waited for by a call."""
        room_B = torch.empty(end - begin + 2 * PAGE, dtype=torch.uint8)
        first = -room_B.data_ptr() % PAGE
        wait = self.file.read_around(room_B[first:].numpy().data, begin, end, self._pieces)

        def bytes_of() -> Tensor:
            try:
                ahead = wait()
                self.file.check_unchanged()
            except CheckpointError as error:
                raise CheckpointError(f"{error.message} ({stored.name})") from error
            return room_B[first + ahead : first + ahead + end - begin]

        return bytes_of

    def read(self, stored: StoredTensor, begin: int, end: int, shape: tuple[int, ...]) -> Tensor:
        packed = PACKED.get(stored.dtype)
        if packed is not None:
            shape = (*shape[:-1], packed.row_bytes(shape[-1]))
        dtype = torch.uint8 if packed else self._dtype(stored)
        begun = self.begun.pop((begin, end), None) or self.reading(stored, begin, end)
        bytes_B = begun()
        if bytes_B.storage_offset() % dtype.itemsize:
            bytes_B = bytes_B.clone()
        return bytes_B.view(dtype).view(shape)


def _extent(stored: StoredTensor, first: int, count: int) -> Extent:
    """Of some rows of it in its file."""
    rows = stored.shape[0]
    assert 0 <= first <= first + count <= rows, f"{stored.name}: rows {first} to {first + count}"
    size = (stored.end - stored.begin) // max(1, rows)
    return stored.begin + first * size, stored.begin + (first + count) * size


def _state(path: Path) -> object:
    """Another one for another file, or for one that was written to."""
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _there(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointError(f"{path}: the index names this shard, but it is not there; download it again")
    return path
