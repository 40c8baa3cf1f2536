"""A fused attention half of the native library over its part of a cache, grouped-query or latent: how it is called.

It knows addresses, and no fallback: `native.py` runs single ops where there is none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.kernels import _native
from afserve.kernels.indexer import chosen_batch
from afserve.kernels.layer import Half
from afserve.kernels.native_products import address
from afserve.kernels.paged import PagedBatch


@dataclass(frozen=True, slots=True)
class HalfOverCache:
    """`top_k` is 0 without a router; `held` are tensors that the half reads and nobody else holds. `top` rows are
    chosen by an indexer, 0 without one; with `reuses` those are attended that an earlier layer chose."""

    half: _native.AttentionHalf
    dtype: torch.dtype
    top_k: int
    held: tuple[Tensor | None, ...]
    top: int = 0
    reuses: bool = False


def fits(over: HalfOverCache, x_TH: Tensor) -> bool:
    return x_TH.dtype is over.dtype and x_TH.is_contiguous()


def run(engine: _native.Engine, over: HalfOverCache, x_TH: Tensor, batch: PagedBatch) -> Half:
    tokens = x_TH.shape[0]
    normed, expert, weight = torch.empty_like(x_TH), None, None
    if over.top_k:  # sizes one by one, since a tuple of them takes half as long again
        expert = torch.empty(tokens, over.top_k, dtype=torch.int32)
        weight = torch.empty(tokens, over.top_k, dtype=torch.float32)
    slot_TK = room_for_choice(over.top, batch)
    if over.reuses and batch.chosen.rows is not None:
        slot_TK = batch.chosen.rows.block_table_SB
    over.half.run(
        engine,
        batch_handle(batch),
        x_TH.data_ptr(),
        normed.data_ptr(),
        address(expert),
        address(weight),
        *slots_of(slot_TK),
    )
    if over.top:
        batch.chosen.rows = None if slot_TK is None else chosen_batch(batch, slot_TK, over.top)
    return Half(normed, expert, weight)


def room_for_choice(top: int, batch: PagedBatch) -> Tensor | None:
    """For the slots of the `top` rows that each token attends; None where all attend all that they see."""
    if not top or batch.max_context <= top:
        return None
    return torch.zeros((batch.tokens, top), dtype=torch.int32)


def slots_of(slot_TK: Tensor | None) -> tuple[int, int]:
    """Address, and slots of a token."""
    return (0, 0) if slot_TK is None else (slot_TK.data_ptr(), slot_TK.shape[1])


def batch_handle(batch: PagedBatch) -> _native.Batch:
    """Addresses of the batch's integers: those that `bind_batch` looked up for all layers of a step, or now."""
    if isinstance(batch.handle, _native.Batch):
        return batch.handle
    table = batch.block_table_SB
    return _native.Batch(
        batch.query_start_S1.data_ptr(),
        batch.context_S.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        batch.sequences,
        batch.position_T.data_ptr(),
        batch.kv_slot_T.data_ptr(),
        batch.tokens,
    )
