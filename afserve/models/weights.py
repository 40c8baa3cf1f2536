"""Tensors by name: from a Hugging Face checkpoint folder (safetensors only), or random for dry runs.

A reader hands out one tensor at a time, checked against the shape that the caller expects, de-quantised where it
is stored in fewer bits, or as those blocks or codes where the caller can multiply them. The bytes come from
`tensor_files.py`. It does not know which tensors a model has.
"""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from afserve.coverage import QuantCoverage
from afserve.errors import CheckpointError
from afserve.kernels.formats.ggml import GgmlRows
from afserve.kernels.formats.scaled import FP8, GROUP, BlockScaled, quantised_blocks, spread
from afserve.kernels.grouped import Grouped, groups_of
from afserve.models.identity import DUMMY_SCALE, role_of
from afserve.models.quantised import QuantisedWeights
from afserve.models.shards import SINGLE, located
from afserve.models.tensor_files import TensorFiles
from afserve.quantization import Quantization

SCALE_SUFFIX = "_scale_inv"
CPU = torch.device("cpu")
# Those that random weights leave at 1:
NORMS = "norm.weight", "norm_1.weight", "norm_2.weight", "norm_f.weight"
_LARGE = 1 << 20  # numbers of a tensor
_WORDS = 1 << 14  # of 8 random bytes, drawn at a time
_CODE_DEVIATION = (255 / 12) ** 0.5  # of sixteen codes that are all as likely
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class WholeTensors(Protocol):
    def has_tensor(self, name: str) -> bool: ...

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor `name` in `dtype`; it is the caller's own."""

    def ggml(self, name: str, shape: tuple[int, int]) -> GgmlRows | None:
        """The weight `name` as it is stored, if that is one of ggml's types whose rows lie as the family has them."""
        return None

    def block_scaled(self, name: str, shape: tuple[int, int]) -> BlockScaled | None:
        """The weight `name` as it is stored, if that is e4m3 with 128x128 scales."""
        return None


class TensorSource(WholeTensors, Protocol):
    @property
    def makes_int4(self) -> bool:
        """Whether `int4` gives any weight as codes that nothing was rounded to: random ones."""

    @property
    def bytes_read(self) -> int:
        """From files, so far."""

    def stores(self, name: str) -> bool:
        """Whether there is such a weight, in whatever form, without being asked for it."""

    def rows(self, name: str, shape: tuple[int, ...], first: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` rows of the tensor `name` of `shape`, from row `first` on; the others are not read."""

    def picked(self, name: str, shape: tuple[int, ...], numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Those rows of the tensor `name` of `shape`, one or more; the others are not read."""
        return torch.cat([self.rows(name, shape, number, 1, dtype) for number in numbers])

    def together(self, names: Sequence[str], row: int | None = None) -> AbstractContextManager[None]:
        """Within it those tensors, or this row of each, are asked for: a disk reads all from the beginning."""
        return nullcontext()

    def has_int4(self, name: str) -> bool:
        """Whether the weight `name` is 4-bit codes with scales of groups, and `int4` gives them."""

    def int4(self, name: str, shape: tuple[int, int], size: int) -> Grouped:
        """The weight `name` as groups of `size` inputs, without rounding."""

    def int4_of(self, name: str, shape: tuple[int, int, int], expert: int, size: int) -> Grouped:
        """The same of one of the weights (E, O, I) that the tensor `name` has."""


class StoredTensors(TensorSource):
    """Those of a folder's files, which may have more than anybody asks for."""

    makes_int4 = False

    def __init__(self, folder: Path, device: torch.device, past_cache: bool) -> None:
        """`past_cache`: the system keeps nothing of what is read."""
        self.folder, self._device = folder, device
        self._files = TensorFiles(folder, past_cache=past_cache)
        self._read: set[str] = set()

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    @property
    def read(self) -> Collection[str]:
        """Names of those that were asked for."""
        return self._read

    def check_changes(self, recheck: Callable[[], bool]) -> None:
        """A file that was written to since it was opened is read on only where `recheck` finds that the folder still
        has what it had. Without this it is not."""
        self._files.recheck = recheck

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """Of all tensors, those that nobody asks for included."""

    @abstractmethod
    def says(self, name: str) -> bool:
        """Whether any number of it is not zero."""


class Checkpoint(StoredTensors):
    """A folder with `model.safetensors`, or with shards and their index."""

    def __init__(
        self,
        folder: str | Path,
        fp8_block: tuple[int, int] | None = None,
        device: torch.device = CPU,
        quantization: Quantization | None = None,
        coverage: QuantCoverage | None = None,
        past_cache: bool = False,
    ) -> None:
        """`coverage`: which weights config.json says are quantised."""
        super().__init__(Path(folder), device, past_cache)
        self._fp8_block, self._coverage = fp8_block, coverage
        self._file_of = located(self.folder, self._files.names)
        self._quantised = QuantisedWeights(quantization, self._raw, self.has_tensor, self._where, self._part)

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def says(self, name: str) -> bool:
        bytes_B = self._files.tensor(self._file_of[name], name).flatten().view(torch.uint8)
        return bool(bytes_B.any())

    def has_tensor(self, name: str) -> bool:
        return name in self._file_of

    def stores(self, name: str) -> bool:
        return self.has_tensor(name) or self._quantised.holds(name)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if len(shape) == 2 and self._quantised.holds(name):
            return self._quantised.dequantised(name, (shape[0], shape[1])).to(self._device, dtype)
        raw = self._shaped(name, shape)
        if raw.dtype in (FP8, torch.int8) and self._quantised.scales(raw):
            return self._quantised.scaled(name, raw).to(self._device, dtype)
        if raw.dtype == FP8:
            return self._dequantised(name, raw).to(self._device, dtype)
        return self._plain(name, raw, dtype)

    def rows(self, name: str, shape: tuple[int, ...], first: int, count: int, dtype: torch.dtype) -> Tensor:
        if self._quantised.holds(name):
            return self._quantised.rows(name, shape, first, count).to(self._device, dtype)
        return self._plain(name, self._part(name, shape, first, count), dtype, stacked=True)

    def together(self, names: Sequence[str], row: int | None = None) -> AbstractContextManager[None]:
        return self._files.together([(self._file_of[n], n, row) for n in names if n in self._file_of])

    def picked(self, name: str, shape: tuple[int, ...], numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._plain(name, self._files.picked(self._file(name, shape), name, numbers), dtype, True)

    def whole_numbers(self, name: str, count: int) -> Tensor:
        """The tensor `name` of so many integers, as int64."""
        raw = self._shaped(name, (count,))
        if raw.is_floating_point() or raw.is_complex():
            raise CheckpointError(f"{self._where(name)}: {name} has dtype {raw.dtype}, it counts tokens")
        return raw.to(self._device, torch.int64)

    def _plain(self, name: str, raw: Tensor, dtype: torch.dtype, stacked: bool = False) -> Tensor:
        if raw.dtype not in FLOATS:
            raise CheckpointError(
                f"{self._where(name)}: {name} has dtype {raw.dtype}, which afserve cannot serve"
            )
        self._check_plain(name, raw, stacked)
        return raw.to(self._device, dtype)

    def _check_plain(self, name: str, raw: Tensor, stacked: bool) -> None:
        """A weight that was never quantised, or no more, is not what config.json says."""
        said = self._coverage
        if said is None or raw.dim() < 2 or not said.covers(name.removesuffix(".weight"), stacked):
            return
        kept = str(raw.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{self._where(name)}: {name} is plain {kept}, but quantization_config of config.json says {said.method}; "
            f"take quantization_config out if the weights are not quantised, or list the module in its {said.key}"
        )

    def block_scaled(self, name: str, shape: tuple[int, int]) -> BlockScaled | None:
        raw = self._shaped(name, shape)
        if raw.dtype != FP8 or self._fp8_block != (GROUP, GROUP):
            return None
        return BlockScaled(raw.to(self._device), self._scale(name, shape, (GROUP, GROUP)).to(self._device))

    def has_int4(self, name: str) -> bool:
        how = self._quantised.how
        return how is not None and how.regular and self._quantised.holds(name)

    def int4(self, name: str, shape: tuple[int, int], size: int) -> Grouped:
        return self._quantised.grouped(name, shape, size)

    def int4_of(self, name: str, shape: tuple[int, int, int], expert: int, size: int) -> Grouped:
        return self._quantised.one_of(name, shape, expert)

    def _shaped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        raw = self._raw(name)
        self._check_shape(name, tuple(raw.shape), shape)
        return raw

    def _check_shape(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise CheckpointError(
                f"{self._where(name)}: {name} has shape {found}, config.json asks for {shape}"
            )

    def _raw(self, name: str) -> Tensor:
        """As it is stored."""
        return self._files.tensor(self._file(name), name)

    def _part(self, name: str, shape: tuple[int, ...], first: int, count: int) -> Tensor:
        """Some rows of a tensor of this shape, as they are stored."""
        return self._files.rows(self._file(name, shape), name, first, count)

    def _file(self, name: str, shape: tuple[int, ...] | None = None) -> str:
        """Of a tensor that is to be read, of this shape."""
        if name not in self._file_of:
            hint = self._quantised.hint(name)
            raise CheckpointError(f"{self.folder}: tensor {name} is missing from the checkpoint{hint}")
        self._read.add(name)
        if shape is not None:
            self._check_shape(name, self._files.shape(self._file_of[name], name), shape)
        return self._file_of[name]

    def _dequantised(self, name: str, raw: Tensor) -> Tensor:
        """DeepSeek's layout: float32 `weight_scale_inv` of ceil(out / b0) x ceil(in / b1); w = q * scale."""
        if raw.dim() != 2:
            raise CheckpointError(
                f"{self._where(name)}: {name} is FP8 of shape {tuple(raw.shape)}; only matrices are read from FP8"
            )
        if self._fp8_block is None:
            raise CheckpointError(
                f"{self._where(name)}: {name} is FP8 but config.json has no quantization_config.weight_block_size"
            )
        shape, block = (raw.shape[0], raw.shape[1]), self._fp8_block
        return raw.float() * spread(self._scale(name, shape, block), shape, block)

    def _scale(self, name: str, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
        (rows, columns), (b0, b1) = shape, block
        scale = self._raw(name + SCALE_SUFFIX).float()
        if tuple(scale.shape) != (-(-rows // b0), -(-columns // b1)):
            raise CheckpointError(
                f"{self._where(name)}: {name}{SCALE_SUFFIX} has shape {tuple(scale.shape)}, blocks of {b0}x{b1} "
                f"over {rows}x{columns} need {(-(-rows // b0), -(-columns // b1))}"
            )
        return scale

    def _where(self, name: str) -> str:
        return str(self.folder / self._file_of.get(name, SINGLE))


class DummyCheckpoint(TensorSource):
    """Random weights for any shape; the same name and seed give the same numbers on every node."""

    makes_int4, bytes_read = True, 0

    def __init__(
        self, seed: int = 0, device: torch.device = CPU, in_blocks: QuantCoverage | None = None
    ) -> None:
        """`in_blocks`: which linear maps are in FP8 blocks for who asks for those, but for routed experts."""
        self._seed, self._device, self._in_blocks = seed, device, in_blocks

    def has_tensor(self, name: str) -> bool:
        return not name.endswith(".bias")

    def stores(self, name: str) -> bool:
        return False

    def block_scaled(self, name: str, shape: tuple[int, int]) -> BlockScaled | None:
        said = self._in_blocks
        if said is None or role_of(name) == "expert" or not said.covers(name.removesuffix(".weight")):
            return None
        return quantised_blocks(self.tensor(name, shape, torch.bfloat16))

    def has_int4(self, name: str) -> bool:
        return False

    def int4(self, name: str, shape: tuple[int, int], size: int) -> Grouped:
        """Random codes, each as likely as any other, with the standard deviation of the others."""
        outputs, inputs = shape
        code_OI = torch.empty(shape, dtype=torch.int8)
        for part, bits in self._bits(name, code_OI.view(-1)):
            torch.bitwise_right_shift(bits, 4, out=part)
        scale = torch.tensor(DUMMY_SCALE / _CODE_DEVIATION).bfloat16().float()
        made = Grouped(code_OI, scale.expand(outputs, groups_of(inputs, size)).contiguous(), size)
        return replace(made, code_OI=made.code_OI.to(self._device), scale_OG=made.scale_OG.to(self._device))

    def int4_of(self, name: str, shape: tuple[int, int, int], expert: int, size: int) -> Grouped:
        return self.int4(f"{name}[{expert}]", shape[1:], size)

    def rows(self, name: str, shape: tuple[int, ...], first: int, count: int, dtype: torch.dtype) -> Tensor:
        return self.tensor(f"{name}[{first}:{first + count}]", (count, *shape[1:]), dtype)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name.endswith(NORMS):
            return torch.ones(shape, dtype=dtype, device=self._device)
        count = math.prod(shape)
        if count >= _LARGE:  # uniform, which is several times as fast
            step = DUMMY_SCALE * 3**0.5 / (1 << 15)
            made = torch.empty(shape, dtype=dtype)
            for part, bits in self._bits(name, made.view(-1), torch.int16):
                part.copy_(bits).mul_(step)
            return made.to(self._device)
        return (
            torch.randn(shape, generator=self._generator(name), dtype=torch.float32)
            .mul_(DUMMY_SCALE)
            .to(self._device, dtype)
        )

    def _bits(
        self, name: str, out: Tensor, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of `out`, and for each as many whole numbers of `dtype`, all as likely; no more than a cache holds."""
        drawn = out.dtype if dtype is None else dtype
        words, generator = torch.empty(_WORDS, dtype=torch.int64), self._generator(name)
        for part in out.split(_WORDS * 8 // drawn.itemsize):
            words.random_(-(1 << 63), None, generator=generator)
            yield part, words.view(drawn)[: len(part)]

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
