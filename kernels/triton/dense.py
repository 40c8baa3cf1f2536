"""Dense products on a CUDA device: PyTorch's (cuBLAS), and Triton's of maps whose weights stay in FP8. Shapes as in
`reference.py`."""

from functools import partial
from typing import cast

import torch
from torch import Tensor

from afserve.kernels.formats.scaled import BlockScaled
from afserve.kernels.packed import PackedLinear
from afserve.kernels.reference import Reference
from afserve.kernels.triton import norm as triton_norm
from afserve.kernels.triton.launch import planned
from afserve.kernels.triton.linear_fp8 import linear_fp8, tile_of_map
from afserve.kernels.triton.tiles import TileTable


class DenseBackend(Reference):
    fp8_maps = True

    def __init__(self, device: torch.device, multiprocessors: int, tiles: TileTable, has_fp8: bool) -> None:
        super().__init__(device)
        self._multiprocessors, self.tiles, self._has_fp8 = multiprocessors, tiles, has_fp8
        self._expert_tiles = planned(tiles.expert_tiles)
        self._map_tile = planned(partial(tile_of_map, tiles, multiprocessors))

    def holds_fp8(self, dtype: torch.dtype) -> bool:
        return self._has_fp8 and dtype.itemsize == 2

    def pack_linear_fp8(self, weight: BlockScaled, bias_O: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        if not self.holds_fp8(dtype):
            return super().pack_linear_fp8(weight, bias_O, dtype)
        kept = BlockScaled(*(x.to(self.device).contiguous() for x in (weight.q_OI, weight.scale)))
        return PackedLinear(*weight.shape, None, bias_O, kept, dtype)

    def linear(self, x_TI: Tensor, packed: PackedLinear) -> Tensor:
        if packed.handle is None:
            return super().linear(x_TI, packed)
        blocks = cast(BlockScaled, packed.handle)
        tile = self._map_tile(len(x_TI), packed.outputs)
        return linear_fp8(x_TI, blocks, packed.bias_O, tile)

    def mlp(self, x_TH: Tensor, gate_up: PackedLinear, down: PackedLinear) -> Tensor:
        return self.linear(triton_norm.silu_mul(self.linear(x_TH, gate_up)), down)
