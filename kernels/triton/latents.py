"""The ops over latents (MLA) and over rows that an indexer chooses, on a CUDA device. Shapes as in `reference.py`."""

from typing import cast

import torch
from torch import Tensor

from afserve.kernels.formats.eight_bits import is_eight
from afserve.kernels.latent import MlaLayer
from afserve.kernels.packed import PackedHeads
from afserve.kernels.paged import PagedBatch
from afserve.kernels.triton.choice import choose_rows
from afserve.kernels.triton.dense import DenseBackend
from afserve.kernels.triton.eight import expect_words, rows_dtype
from afserve.kernels.triton.kv import keep_latents
from afserve.kernels.triton.latent_prompts import PromptPlans, plan_of, plannable
from afserve.kernels.triton.mla import attend_mla
from afserve.kernels.triton.mla_prompts import multiply_up
from afserve.kernels.triton.near import FetchedRows
from afserve.kernels.triton.split import parts_for
from afserve.kernels.triton.tiles import TileTable


class LatentBackend(DenseBackend):
    """`parts` as of `TritonBackend`."""

    near_rows = FetchedRows

    def __init__(
        self,
        device: torch.device,
        multiprocessors: int,
        tiles: TileTable,
        has_fp8: bool,
        parts: int | None,
    ) -> None:
        super().__init__(device, multiprocessors, tiles, has_fp8)
        self._parts = parts

    def empty_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """ConfigError for rows in 8 bits that are not read here."""
        expect_words(shape[-1], dtype, self._has_fp8)
        return super().empty_cache(shape, dtype)

    def context_parts(self, programs: int, keys: int, shortest: int) -> int:
        """Into how many parts a context of so many keys is cut for so many programs."""
        return self._parts or parts_for(programs, keys, shortest, self._multiprocessors)

    def keep_latents(
        self, made_TD: Tensor, layer: MlaLayer, cache_NBC: Tensor, batch: PagedBatch
    ) -> Tensor | None:
        if layer.borrows:
            return None
        return keep_latents(made_TD, layer, cache_NBC, batch)

    def attend_mla(
        self, q_TAC: Tensor, cache_NBC: Tensor, rank: int, batch: PagedBatch, scale: float
    ) -> Tensor:
        return self._attend_absorbed(q_TAC[:, :, :rank], q_TAC[:, :, rank:], cache_NBC, batch, scale)

    def _attend_absorbed(
        self, q_TAC: Tensor, q_rope_TAE: Tensor, cache_NBC: Tensor, batch: PagedBatch, scale: float
    ) -> Tensor:
        tokens, heads = q_TAC.shape[:2]
        kind = rows_dtype(cache_NBC, q_TAC)
        tile = self.tiles.mla(heads, kind.itemsize, is_eight(cache_NBC.dtype))
        parts = self.context_parts(tokens * -(-heads // tile.queries), batch.max_context, tile.split)
        q, q_rope = q_TAC.to(kind), q_rope_TAE.to(kind)
        return attend_mla(q, q_rope, cache_NBC, batch, scale, tile, parts).to(q_TAC.dtype)

    def linear_heads(self, x_TAI: Tensor, packed: PackedHeads) -> Tensor:
        """The product is written token by token, so that nothing is moved behind it: cuBLAS takes rows that lie apart
        (`bmm_out_cuda_impl` of PyTorch's `Blas.cpp`)."""
        if packed.handle is None:
            assert packed.weight_AOI is not None
            packed.handle = packed.weight_AOI.mT
        out_TAO = x_TAI.new_empty(x_TAI.shape[0], packed.heads, packed.outputs)
        torch.bmm(x_TAI.transpose(0, 1), cast(Tensor, packed.handle), out=out_TAO.transpose(0, 1))
        return out_TAO

    def choose_rows(
        self, q_TJI: Tensor, weight_TJ: Tensor, index_NBI: Tensor, batch: PagedBatch, top: int
    ) -> Tensor:
        return choose_rows(q_TJI, weight_TJ, index_NBI, batch, top)

    def bind_batch(self, batch: PagedBatch) -> PagedBatch:
        return batch.with_handle(PromptPlans()) if plannable(batch) else batch

    def attend_latent(
        self, q_TAD: Tensor, q_rope_TAE: Tensor, layer: MlaLayer, cache_NBC: Tensor, batch: PagedBatch
    ) -> Tensor:
        """Absorbed, but for prompts whose latents are multiplied up (`latent_prompts.py`)."""
        tile = self.tiles.mla_prompt(rows_dtype(cache_NBC, q_TAD).itemsize)
        plan = plan_of(layer, q_TAD, cache_NBC, batch, tile.queries)
        if plan is None:
            return self._absorbed(q_TAD, q_rope_TAE, layer, cache_NBC, batch)
        out_TAV = q_TAD.new_empty((*q_TAD.shape[:2], layer.value_size))
        if plan.absorbed is not None:
            row_R, part = plan.absorbed.row_R, plan.absorbed.batch
            out_TAV[row_R] = self._absorbed(q_TAD[row_R], q_rope_TAE[row_R], layer, cache_NBC, part)
        for prompts in plan.prompts:
            multiply_up(q_TAD, q_rope_TAE, layer, cache_NBC, prompts, tile, out_TAV)
        return out_TAV

    def _absorbed(
        self, q_TAD: Tensor, q_rope_TAE: Tensor, layer: MlaLayer, cache_NBC: Tensor, batch: PagedBatch
    ) -> Tensor:
        q_TAC = self.linear_heads(q_TAD, layer.up_k)
        seen_TAC = self._attend_absorbed(q_TAC, q_rope_TAE, cache_NBC, batch, layer.scale)
        return self.linear_heads(seen_TAC, layer.up_v)
