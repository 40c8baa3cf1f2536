"""Tensors by a family's names out of GGUF files: de-quantised, and put as the family's other checkpoints have them.

Queries and keys get back the order of their rows, the two projections up from a latent become one, an expert's tensor
is its part of the layer's. Of Q4_0 and MXFP4 experts the codes are given as they are stored.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from afserve.errors import CheckpointError
from afserve.families.pattern.naming import Naming
from afserve.gguf.architectures import architecture_named
from afserve.gguf.kinds import PACKED
from afserve.gguf.names import TensorPiece, pieces_of
from afserve.json_file import LIST_BYTES, read_object
from afserve.kernels.formats.ggml import TYPES, GgmlRows
from afserve.kernels.grouped import Grouped
from afserve.models.blocks import dequantised, groups
from afserve.models.shards import GGUF_INDEX, read_index
from afserve.models.weights import FLOATS, StoredTensors
from afserve.spec import ModelSpec
from afserve.spec_parts import AttentionSpec


class GgufCheckpoint(StoredTensors):
    """A folder that `folder.py` made: a config.json and links to GGUF files."""

    def __init__(
        self, folder: Path, spec: ModelSpec, naming: Naming, device: torch.device, past_cache: bool = False
    ) -> None:
        super().__init__(folder, device, past_cache)
        self._spec = spec
        self._file_of = read_index(folder) or {}
        known = architecture_named(
            read_object(folder / GGUF_INDEX, LIST_BYTES).get("architecture"), str(folder)
        )
        self._pieces = pieces_of(self._file_of, naming, known, spec.experts, str(folder))
        nets = (kind.attention for kind in spec.kinds if kind.attention.kind == "linear")
        self._delta = next(nets, None)
        how = spec.quantization
        self._kept = how.layout.upper() if how and how.regular else None

    @property
    def names(self) -> Collection[str]:
        return self._pieces.keys()

    def says(self, name: str) -> bool:
        """Of blocks any byte counts."""
        stored = self._piece(name).stored
        return bool(self._files.tensor(self._file_of[stored], stored).flatten().view(torch.uint8).any())

    def has_tensor(self, name: str) -> bool:
        return name in self._pieces

    def stores(self, name: str) -> bool:
        return self.has_tensor(name)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        piece = self._piece(name)
        if piece.beside:
            return self._joined(name, piece, shape, dtype)
        found = self._values(piece, shape, dtype)
        if piece.change:
            found = _CHANGES[piece.change](found, self._delta or self._spec.kinds[0].attention)
        return found.to(self._device)

    def together(self, names: Sequence[str], row: int | None = None) -> AbstractContextManager[None]:
        found = [self._pieces[name] for name in names if name in self._pieces]
        return self._files.together([(self._file(one), one.stored, one.expert) for one in found])

    def rows(self, name: str, shape: tuple[int, ...], first: int, count: int, dtype: torch.dtype) -> Tensor:
        return self.tensor(name, shape, dtype)[first : first + count].clone()

    def ggml(self, name: str, shape: tuple[int, int]) -> GgmlRows | None:
        piece = self._pieces.get(name)
        if piece is None or piece.beside or piece.change not in _OF_ROWS or self._kind(piece) not in TYPES:
            return None
        self._read.add(name)
        raw_RB = self._raw(piece, shape)
        if piece.change:
            raw_RB = _CHANGES[piece.change](raw_RB, self._delta or self._spec.kinds[0].attention)
        return GgmlRows(self._kind(piece), raw_RB, shape[1])

    def has_int4(self, name: str) -> bool:
        piece = self._pieces.get(name)
        return piece is not None and self._kind(piece) == self._kept

    def int4(self, name: str, shape: tuple[int, int], size: int) -> Grouped:
        piece = self._piece(name)
        if self._kept is None or self._kind(piece) != self._kept:
            raise CheckpointError(
                f"{self._where(piece)}: {piece.stored} is {self._kind(piece)}, the other experts are {self._kept}"
            )
        return groups(self._raw(piece, shape).flatten(0, -2), self._kept)

    def int4_of(self, name: str, shape: tuple[int, int, int], expert: int, size: int) -> Grouped:
        raise self._missing(name)  # by the family's names every expert has tensors of its own

    def _joined(self, name: str, piece: TensorPiece, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Of each head, rows up to its keys, then rows up to its values; keys are stored the other way round."""
        a = self._spec.kinds[0].attention
        k_ACN = self._values(piece, (a.heads, a.kv_lora_rank, a.nope_dim), dtype)
        v_AVC = self._values(TensorPiece(piece.beside), (a.heads, a.value_dim, a.kv_lora_rank), dtype)
        joined: Tensor = torch.cat((k_ACN.transpose(1, 2), v_AVC), 1).flatten(0, 1)
        if tuple(joined.shape) != shape:
            raise CheckpointError(f"{self._where(piece)}: {name} would have shape {tuple(joined.shape)}")
        return joined.to(self._device)

    def _values(self, piece: TensorPiece, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raw, kind = self._raw(piece, shape), self._kind(piece)
        if kind not in PACKED:
            if raw.dtype not in FLOATS:
                raise CheckpointError(
                    f"{self._where(piece)}: {piece.stored} has dtype {kind}; floats are served"
                )
            return raw.to(dtype)
        rows_RB = raw.flatten(0, -2) if raw.dim() > 1 else raw[None]
        return dequantised(GgmlRows(kind, rows_RB, shape[-1]), dtype).view(shape)

    def _raw(self, piece: TensorPiece, shape: tuple[int, ...]) -> Tensor:
        """As it is stored: numbers, or the bytes of blocks, row by row."""
        file = self._file(piece)
        found = self._files.shape(file, piece.stored)
        if piece.expert is not None:
            self._check_shape(piece, found, (self._spec.experts, *shape))
            return self._files.rows(file, piece.stored, piece.expert, 1)[0]
        raw = self._files.tensor(file, piece.stored)
        if found != shape and _without_ones(found) == _without_ones(shape):  # such as a gate of one output
            return raw.reshape(*shape[:-1], raw.shape[-1])
        self._check_shape(piece, found, shape)
        return raw

    def _check_shape(self, piece: TensorPiece, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise CheckpointError(
                f"{self._where(piece)}: {piece.stored} has shape {found}, the metadata asks for {shape}"
            )

    def _kind(self, piece: TensorPiece) -> str:
        return self._files.kind(self._file(piece), piece.stored)

    def _piece(self, name: str) -> TensorPiece:
        piece = self._pieces.get(name)
        if piece is None:
            raise self._missing(name)
        self._read.add(name)
        return piece

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self._whole()}: there is no tensor for {name}")

    def _file(self, piece: TensorPiece) -> str:
        file = self._file_of.get(piece.stored)
        if file is None:
            raise CheckpointError(f"{self._whole()}: tensor {piece.stored} is missing")
        return file

    def _where(self, piece: TensorPiece) -> str:
        return str((self.folder / self._file(piece)).resolve())

    def _whole(self) -> str:
        """The file, or the first of its parts."""
        return str((self.folder / min(self._file_of.values(), default="")).resolve())


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)


def _by_key_head(x_R: Tensor, a: AttentionSpec) -> Tensor:
    """Rows of one value head after the other, those of a key head side by side: llama.cpp has the first one of every
    key head, then the second ones."""
    tiles = x_R.unflatten(0, (a.heads // a.kv_heads, a.kv_heads, -1))
    ordered: Tensor = tiles.transpose(0, 1).flatten(0, 2)
    return ordered


def _behind_keys(x_R: Tensor, a: AttentionSpec) -> Tensor:
    both = 2 * a.kv_heads * a.head_dim
    return torch.cat((x_R[:both], _by_key_head(x_R[both:], a)))


def _halves_apart(x_R: Tensor, a: AttentionSpec) -> Tensor:
    """Rows of one head after the other: llama.cpp turns neighbours, Hugging Face the two halves of a head."""
    pairs = x_R.unflatten(0, (-1, a.head_dim // 2, 2))
    apart: Tensor = pairs.transpose(1, 2).flatten(0, 2)
    return apart


_CHANGES: dict[str, Callable[[Tensor, AttentionSpec], Tensor]] = {
    "halves": _halves_apart,
    "norm": lambda x, a: x - 1,
    "rows": _by_key_head,
    "keys": _behind_keys,
    "columns": lambda x, a: _by_key_head(x.T, a).T.contiguous(),
    "rates": lambda x, a: _by_key_head(x, a).neg().log(),
}
"""By `TensorPiece.change`."""
_OF_ROWS = ("", "halves", "rows", "keys")
"""Those that only order rows, whatever is in them."""
