"""Tensors as the safetensors files of a folder store them: mapped into memory, or read into memory of their own.

Mapped files are shared by all processes, and what is never looked at is never read. Reading with the calls of
`comm/disk` is faster where the whole of a tensor is packed into something else at once, as experts are. Which file has
which tensor is the caller's business.
"""

import threading
import weakref
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from afserve.comm.disk.files import File
from afserve.errors import CheckpointError
from afserve.models.shards import ShardFile, StoredTensor

MOST_MAPPED = 512 << 20  # bytes handed out before files are mapped anew
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class MappedFiles:
    """Views of mapped files. They are mapped anew now and then, so that what was read does not stay in the process; a
    tensor that is still used keeps its own mapping."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, safe_open] = {}
        self._given = 0

    def tensor(self, file: str, name: str) -> Tensor:
        """Raises CheckpointError."""
        try:
            tensor: Tensor = self._shard(file).get_tensor(name)
        except SafetensorError as error:
            raise _unreadable(self._folder / file, name, error) from error
        self._given += tensor.nbytes
        return tensor

    def _shard(self, file: str) -> safe_open:
        if self._given > MOST_MAPPED:
            self._open, self._given = {}, 0
        opened = self._open  # another thread may begin a new one meanwhile
        if file not in opened:
            path = _there(self._folder / file)
            try:
                opened[file] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path}: not a whole safetensors file: {error}; download it again"
                ) from error
        return opened[file]


class ReadFiles:
    """Copies, read in one call each. Several threads may read at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, _Shard] = {}
        self._guard = threading.Lock()

    def reads(self, file: str, name: str) -> bool:
        """Whether it is a vector or matrix of a known dtype; of a stack of matrices one is wanted at a time."""
        stored = self._shard(file).stored.get(name)
        return stored is not None and len(stored.shape) <= 2 and stored.dtype in _DTYPES

    def tensor(self, file: str, name: str) -> Tensor:
        """One that `reads`. Raises CheckpointError."""
        shard = self._shard(file)
        stored = shard.stored[name]
        dtype, size = _DTYPES[stored.dtype], stored.end - stored.begin
        bytes_B = torch.empty(size, dtype=torch.uint8)
        try:
            found = shard.file.read_into(bytes_B.numpy().data, stored.begin)
        except OSError as error:
            raise _unreadable(self._folder / file, name, error.strerror) from error
        if found < size:
            raise _unreadable(
                self._folder / file, name, f"the file ends {size - found:,} bytes before the tensor does"
            )
        return bytes_B.view(dtype).view(stored.shape)

    def _shard(self, file: str) -> "_Shard":
        with self._guard:
            if file not in self._open:
                self._open[file] = _Shard(_there(self._folder / file))
            return self._open[file]


class _Shard:
    """One open file and its header; it is closed with the last reference."""

    def __init__(self, path: Path) -> None:
        with ShardFile(path) as header:
            self.stored: dict[str, StoredTensor] = {row.name: row for row in header.tensors()}
        try:
            self.file = File(path, writes=False)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}; download it again") from error
        weakref.finalize(self, self.file.close)


def _there(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointError(f"{path}: the index names this shard, but it is not there; download it again")
    return path


def _unreadable(path: Path, name: str, why: object) -> CheckpointError:
    return CheckpointError(f"{path}: {name} cannot be read: {why}")
