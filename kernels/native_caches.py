"""A paged cache as the native library is told of it: addresses, strides and order; written and attended there.

It checks nothing but what addresses need. Shapes as in `ops.py`.
"""

import torch
from torch import Tensor

from afserve.kernels import _native, tiled
from afserve.kernels.formats.eight_bits import key_numbers
from afserve.kernels.indexer import NearRows
from afserve.kernels.native_half import batch_handle
from afserve.kernels.native_products import CODES, address, plain
from afserve.kernels.paged import PagedBatch

EIGHT_BITS = {torch.int8: 1, torch.float8_e4m3fn: 2}  # codes of native/eight.h


def attend(
    engine: _native.Engine,
    q_TAD: Tensor,
    cache: _native.CachePair,
    batch: PagedBatch,
    scale: float,
    window: int = 0,
    sink_A: Tensor | None = None,
) -> Tensor:
    """`window` is 0 for none; `sink_A` is float32."""
    q = q_TAD if q_TAD.stride(2) == 1 else q_TAD.contiguous()
    (tokens, heads, size), (per_token, per_head, _) = q.shape, q.stride()
    columns = cache.value_size
    same = columns == size and q.is_contiguous()
    out = torch.empty_like(q) if same else torch.empty((tokens, heads, columns), dtype=q.dtype)
    _native.attend(
        engine, CODES[q.dtype], q.data_ptr(), per_token, per_head, heads, cache, scale, window, address(sink_A),
        out.data_ptr(), batch_handle(batch),
    )  # fmt: skip
    return out


def choose_rows(
    engine: _native.Engine, q_TJI: Tensor, weight_TJ: Tensor, index_NBI: Tensor, batch: PagedBatch, top: int
) -> Tensor:
    """`Ops.choose_rows` of tensors that it can take."""
    (tokens, heads, size), (per_token, per_head, last) = q_TJI.shape, q_TJI.stride()
    if last != 1:
        return choose_rows(engine, q_TJI.contiguous(), weight_TJ, index_NBI, batch, top)
    weight, most = plain(weight_TJ, torch.float32), min(top, batch.max_context)
    slot_TK = torch.zeros((tokens, most), dtype=torch.int32)
    blocks, block_size, _ = index_NBI.shape
    addresses = q_TJI.data_ptr(), weight.data_ptr(), index_NBI.data_ptr(), slot_TK.data_ptr()
    _native.choose_rows(
        engine, CODES[q_TJI.dtype], addresses, (per_token, per_head), tiled.place(index_NBI.unsqueeze(1)),
        (heads, size, top, blocks, block_size, tokens), most, batch_handle(batch),
    )  # fmt: skip
    return slot_TK


def odd(*tensors: Tensor) -> str:
    """What the library can't take of an op's tensors."""
    kinds = ", ".join(dict.fromkeys(str(x.dtype) for x in tensors))
    gaps = all(x.dtype in CODES for x in tensors) and not all(x.is_contiguous() for x in tensors)
    return f"tensors of {kinds}, with gaps" if gaps else f"tensors of {kinds}"


def fits(cache: Tensor, rows: torch.dtype) -> bool:
    """Whether the library reads and writes this cache with rows of that dtype."""
    known = cache.dtype is rows or cache.dtype in EIGHT_BITS
    return rows in CODES and known and last_plain(cache)


def pair_of(k_NGBD: Tensor, v_NGBD: Tensor, columns: int = 0) -> _native.CachePair:
    """What the native library is told of two caches; of the values only so many columns, if any number is given."""
    blocks, groups, block_size, width = tiled.shape_of(k_NGBD)
    size = key_numbers(width, k_NGBD.dtype)
    return _native.CachePair(
        k_NGBD.data_ptr(),
        tiled.place(k_NGBD),
        size,
        v_NGBD.data_ptr(),
        tiled.place(v_NGBD),
        columns or tiled.shape_of(v_NGBD)[3],
        groups,
        blocks,
        block_size,
        EIGHT_BITS.get(k_NGBD.dtype, 0),
    )


def last_plain(*caches: Tensor) -> bool:
    return all(cache.stride(-1) == 1 for cache in caches)


def write_kv(k_TGD: Tensor, v_TGD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, slot_T: Tensor) -> None:
    if k_NGBD.dtype not in EIGHT_BITS:
        write_cache(k_TGD, k_NGBD, slot_T)
        write_cache(v_TGD, v_NGBD, slot_T)
        return
    k, v, pair = k_TGD.contiguous(), v_TGD.contiguous(), pair_of(k_NGBD, v_NGBD)
    _native.write_pairs(CODES[k.dtype], k.data_ptr(), v.data_ptr(), len(k), slot_T.data_ptr(), pair)


def write_latent(latent_TC: Tensor, cache_N1BC: Tensor, slot_T: Tensor, rank: int) -> None:
    if cache_N1BC.dtype not in EIGHT_BITS:
        write_cache(latent_TC.unsqueeze(1), cache_N1BC, slot_T)
        return
    x, pair = latent_TC.contiguous(), pair_of(cache_N1BC, cache_N1BC, rank)
    _native.write_latents(CODES[x.dtype], x.data_ptr(), len(x), slot_T.data_ptr(), pair)


def write_cache(x_TGD: Tensor, cache_NGBD: Tensor, slot_T: Tensor) -> None:
    x = x_TGD if x_TGD.stride(2) == 1 else x_TGD.contiguous()
    blocks, groups, block_size, size = tiled.shape_of(cache_NGBD)
    _native.write_cache(
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        x.shape[0],
        slot_T.data_ptr(),
        cache_NGBD.data_ptr(),
        tiled.place(cache_NGBD),
        groups,
        size,
        blocks,
        block_size,
    )


class NativeNearRows(NearRows):
    """Until it is opened the reference runs."""

    _handle: _native.NearRows | None = None

    def open_with(self, engine: _native.Engine) -> _native.NearRows:
        """For fused halves too."""
        if self._handle is None:
            of = self.far_SC, self.row_RC, self.place_S, self.slot_R, self.used_R, self.counts_4
            row = self.row_RC.shape[1] * self.row_RC.itemsize
            sizes = row, self.places, len(self.far_SC)
            self._engine, self._handle = engine, _native.NearRows([x.data_ptr() for x in of], sizes)
        return self._handle

    def fetch_rows(self, rows: PagedBatch) -> Tensor:
        if self._handle is None:
            return super().fetch_rows(rows)
        slot_TK, count_T = rows.block_table_SB.contiguous(), rows.context_S.contiguous()
        place_TK, (tokens, most) = torch.zeros_like(slot_TK), slot_TK.shape
        addresses = slot_TK.data_ptr(), count_T.data_ptr()
        self._handle.fetch(self._engine, *addresses, most, tokens, place_TK.data_ptr())
        return place_TK
