"""Quantised weights of a checkpoint: de-quantised to float32, or as int4 groups where they are just that.

It asks for stored tensors by name and knows no file. value = (code - zero) * scale. Whatever does not fit together is
refused with the tensor's name. Shapes: O outputs, I inputs, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.errors import CheckpointError
from afserve.kernels.formats.scaled import FP8
from afserve.kernels.grouped import Grouped, groups_of
from afserve.models.unpacking import MX_GROUP, along_columns, along_rows, awq_columns, mx_codes, mx_values
from afserve.quantization import Quantization

_WORD = {"pack-quantized": ".weight_packed", "gptq": ".qweight", "awq": ".qweight"}
_OTHER = (".weight_packed", ".qweight", ".weight_scale", "_blocks")
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QuantisedWeights:
    """`raw` reads a stored tensor, `has` says whether there is one, `where` names the file that has it. `part` reads of
    one that has to be of a shape, from a row on, so many rows."""

    how: Quantization | None
    raw: Callable[[str], Tensor]
    has: Callable[[str], bool]
    where: Callable[[str], str]
    part: Callable[[str, Shape, int, int], Tensor]

    def holds(self, name: str) -> bool:
        """Whether `name` is stored in words of several codes rather than as itself."""
        if self.how is None or self.has(name):
            return False
        if self.how.e2m1:
            return self.has(f"{name}_blocks")
        suffix = _WORD.get(self.how.layout)
        return suffix is not None and name.endswith(".weight") and self.has(_stem(name) + suffix)

    def scales(self, raw: Tensor) -> bool:
        """Whether a weight that is stored as itself has scales beside it."""
        return self.how is not None and self.how.layout == "scaled" and raw.dim() == 2

    def hint(self, name: str) -> str:
        """Why a missing tensor may be missing; nothing where that is not known."""
        stem = _stem(name)
        found = next((stem + end for end in _OTHER if self.has(stem + end)), None)
        if found is None:
            return ""
        if self.how is None:
            return f"; there is {found}, but config.json has no quantization_config"
        return f"; there is {found}, which is not what quantization_config says ({self.how.layout})"

    def dequantised(self, name: str, shape: tuple[int, int]) -> Tensor:
        """float32, O x I."""
        code_OI, zero_OG, scale_OG, group_I = self._parts(name, shape)
        return (code_OI - zero_OG[:, group_I]) * scale_OG[:, group_I]

    def rows(self, name: str, shape: Shape, first: int, count: int) -> Tensor:
        """Some of the E matrices of an MXFP4 tensor, (E, I, O) as gpt-oss names it: float32, (count, I, O)."""
        experts, inputs, outputs = shape
        blocks, scales = self._mx(name, (experts, outputs, inputs), first, count)
        return mx_values(blocks, scales)[..., :inputs].transpose(1, 2)

    def _mx(self, name: str, shape: Shape, first: int, count: int) -> tuple[Tensor, Tensor]:
        """(E, O, G, 16) pairs of codes and (E, O, G) exponents, of some of the experts."""
        experts, outputs, inputs = shape
        scale_shape = (experts, outputs, groups_of(inputs, MX_GROUP))
        blocks = self.part(f"{name}_blocks", (*scale_shape, MX_GROUP // 2), first, count)
        scales = self.part(f"{name}_scales", scale_shape, first, count)
        self._fits(f"{name}_blocks", blocks, tuple(blocks.shape), torch.uint8)
        self._fits(f"{name}_scales", scales, tuple(scales.shape), torch.uint8)
        return blocks, scales

    def one_of(self, name: str, shape: Shape, expert: int) -> Grouped:
        """`grouped`, of one of the E matrices (E, O, I) of an MXFP4 tensor."""
        blocks, scales = self._mx(name, shape, expert, 1)
        code_OI, scale_OG = mx_codes(blocks[0], scales[0])
        return Grouped(code_OI[:, : shape[2]].contiguous(), scale_OG, MX_GROUP)

    def grouped(self, name: str, shape: tuple[int, int], size: int) -> Grouped:
        """The codes and scales as they are stored; only for a `regular` way. Raises CheckpointError."""
        if not self.holds(name):
            raise CheckpointError(
                f"{self.where(name)}: {name} is not stored in int4 as the other experts of its layer are"
            )
        code_OI, zero_OG, scale_OG, _ = self._parts(name, shape)
        if (zero_OG != 8).any():
            raise self._odd(
                f"{_stem(name)}.qzeros", "has zero points other than 8, but quantization_config says sym"
            )
        return Grouped(_from_the_middle(code_OI), scale_OG, size)

    def _parts(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """code_OI (uint8) and zero_OG (int16) from 0 on, scale_OG, and the group of each input."""
        assert self.how is not None
        stem, (_, inputs) = _stem(name), shape
        groups = 1 if self.how.group is None else groups_of(inputs, self.how.group)
        if self.how.layout == "pack-quantized":
            code, zero, scale = self._packed(stem, shape, groups)
        else:
            code, zero, scale = self._rows_of_inputs(stem, shape, groups)
        return code, zero, scale, self._group_of(stem, inputs, groups)

    def _packed(self, stem: str, shape: tuple[int, int], groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """compressed-tensors: codes and zero points count from the middle on, so both are shifted alike."""
        assert self.how is not None
        (outputs, inputs), each = shape, 32 // self.how.bits
        words = self._words(f"{stem}.weight_packed", (outputs, -(-inputs // each)))
        if self.has(f"{stem}.weight_shape"):
            told = tuple(self.raw(f"{stem}.weight_shape").flatten().tolist())
            if told != shape:
                raise self._odd(f"{stem}.weight_shape", f"says {told}, config.json asks for {shape}")
        code = along_columns(words, self.how.bits)[:, :inputs]
        count = (1,) if self.how.per_tensor else (outputs, groups)
        scale = self._scales(f"{stem}.weight_scale", count).expand(outputs, groups)
        if self.how.symmetric:
            self._no_zeros(f"{stem}.weight_zero_point", outputs)
            return code, torch.full((outputs, groups), 1 << (self.how.bits - 1), dtype=torch.int16), scale
        zero = self._words(f"{stem}.weight_zero_point", (-(-outputs // each), groups))
        return code, along_rows(zero, self.how.bits)[:outputs].short(), scale

    def _rows_of_inputs(
        self, stem: str, shape: tuple[int, int], groups: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """GPTQ and AWQ store the transposed weight; zero points lie eight outputs to a word in both."""
        assert self.how is not None
        (outputs, inputs), each = shape, 32 // self.how.bits
        scale = self._scales(f"{stem}.scales", (groups, outputs)).t()
        zeros = self._words(f"{stem}.qzeros", (groups, -(-outputs // each)))
        if self.how.layout == "awq":
            words = self._words(f"{stem}.qweight", (inputs, -(-outputs // each)))
            code, zero = awq_columns(words).t(), awq_columns(zeros)
        else:
            words = self._words(f"{stem}.qweight", (-(-inputs // each), outputs))
            code, zero = along_rows(words, self.how.bits).t(), along_columns(zeros, self.how.bits)
        zero_OG = ((zero[:, :outputs].short() + self.how.zero_shift) & ((1 << self.how.bits) - 1)).t()
        return code[:outputs, :inputs], zero_OG, scale

    def _group_of(self, stem: str, inputs: int, groups: int) -> Tensor:
        assert self.how is not None
        size = inputs if self.how.group is None else self.how.group
        plain = torch.arange(inputs) // size
        index = f"{stem}.weight_g_idx" if self.how.layout == "pack-quantized" else f"{stem}.g_idx"
        if not self.how.ordered:
            if self.has(index) and not torch.equal(self.raw(index).long(), plain):
                raise self._odd(index, "orders inputs, but quantization_config says no act-order (desc_act)")
            return plain
        order = self.raw(index).long()
        if tuple(order.shape) != (inputs,) or order.min() < 0 or order.max() >= groups:
            raise self._odd(index, f"does not name one of {groups} groups for each of {inputs} inputs")
        return order

    def scaled(self, name: str, raw: Tensor) -> Tensor:
        """An int8 or e4m3 weight times its scales, float32."""
        assert self.how is not None
        outputs, inputs = raw.shape
        scale = self._spread(f"{name}_scale", self._scales, outputs, inputs)
        zero = f"{name}_zero_point"
        if not self.how.symmetric and (self.has(zero) or raw.dtype is not FP8):
            return (raw.float() - self._spread(zero, self._zeros, outputs, inputs)) * scale
        self._no_zeros(zero, outputs)
        return raw.float() * scale

    def _no_zeros(self, name: str, outputs: int) -> None:
        """Zero points beside symmetric codes say nothing: packed ones are the middle, others 0."""
        assert self.how is not None
        if not self.has(name):
            return
        zero, middle = self.raw(name), 0
        if zero.dtype is torch.int32 and zero.dim() == 2 and self.how.layout == "pack-quantized":
            zero, middle = along_rows(zero, self.how.bits)[:outputs], 1 << (self.how.bits - 1)
        if (zero.float() != middle).any():
            raise self._odd(name, "has zero points, but quantization_config says symmetric")

    def _spread(self, name: str, read: Callable[[str, Shape], Tensor], outputs: int, inputs: int) -> Tensor:
        """Of each weight, what a block, the tensor, a row or a group of inputs has in common."""
        assert self.how is not None
        if self.how.block is not None:
            rows, columns = self.how.block
            given = read(name, (-(-outputs // rows), -(-inputs // columns)))
            return given.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
        if self.how.per_tensor:
            return read(name, (1,))
        size = self.how.group or inputs
        return read(name, (outputs, groups_of(inputs, size))).repeat_interleave(size, 1)[:, :inputs]

    def _zeros(self, name: str, shape: Shape) -> Tensor:
        zero = self.raw(name)
        if shape == (1,) and zero.numel() == 1:
            zero = zero.view(1)
        self._fits(name, zero, shape, zero.dtype)
        return zero.float()

    def _words(self, name: str, shape: Shape) -> Tensor:
        words = self.raw(name)
        self._fits(name, words, shape, torch.int32)
        return words

    def _scales(self, name: str, shape: Shape) -> Tensor:
        scale = self.raw(name)
        if shape == (1,) and scale.numel() == 1:
            scale = scale.view(1)
        if not scale.is_floating_point():
            raise self._odd(name, f"has dtype {scale.dtype}, expected a floating one")
        self._fits(name, scale, shape, scale.dtype)
        return scale.float()

    def _fits(self, name: str, stored: Tensor, shape: Shape, dtype: torch.dtype) -> None:
        assert self.how is not None
        if tuple(stored.shape) != shape or stored.dtype is not dtype:
            size = "" if self.how.group is None else f" in groups of {self.how.group}"
            raise self._odd(
                name,
                f"is {stored.dtype} {tuple(stored.shape)}; {self.how.layout} with {self.how.bits} bits{size} "
                f"needs {dtype} {shape}",
            )

    def _odd(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.where(name)}: {name} {why}")


def _from_the_middle(code_OI: Tensor) -> Tensor:
    """Codes of 4 bits from 0 on as those from -8 on, int8."""
    return code_OI.sub(8).view(torch.int8)  # below 0 a byte wraps around to what int8 means


def _stem(name: str) -> str:
    return name.removesuffix(".weight")
