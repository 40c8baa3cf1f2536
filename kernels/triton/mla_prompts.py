"""Triton attention of MLA's prompts with keys and values of each head, which the latents were multiplied up to.

Keys are a head's own part and the rotary part that all heads share, which lies beside the latents. A program takes one
head and a tile of queries of one sequence; what tiles there are is the host's table. It knows no cache and no blocks.
Shapes: T tokens, A heads, M rows of latents, C = rank + rope, G heads whose keys and values are there, N tiles.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.latent import MlaLayer
from afserve.kernels.triton.config import FUSED, AttentionTile
from afserve.kernels.triton.eight import gather_latents
from afserve.kernels.triton.latent_prompts import LatentPrompts, LatentSizes
from afserve.kernels.triton.launch import launched, power_of_two
from afserve.kernels.triton.split import LOG2E, LOWEST


@triton.jit
def _attend_keys(
    q, q_rope, values, largest, total, query, begin, end, k_ptr, v_ptr, rope_ptr, scale, nope, rope, size, columns,
    MASKED: tl.constexpr, EVEN: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Add the keys of [begin, end) to a running softmax; those of a span that is not MASKED are seen by all rows."""
    d = tl.arange(0, NOPE)[None, :]
    e = tl.arange(0, ROPE)[None, :]
    v = tl.arange(0, SIZE)[None, :]
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        k_at = k_ptr + key[:, None] * nope + d
        rope_at = rope_ptr + key[:, None] * columns + e
        v_at = v_ptr + key[:, None] * size + v
        if EVEN and not MASKED:
            own, shared, seen = tl.load(k_at), tl.load(rope_at), tl.load(v_at)
        else:
            exists = (key < end)[:, None]
            own = tl.load(k_at, mask=exists & (d < nope), other=0.0)
            shared = tl.load(rope_at, mask=exists & (e < rope), other=0.0)
            seen = tl.load(v_at, mask=exists & (v < size), other=0.0)
        score = tl.dot(q_rope, tl.trans(shared), input_precision=PRECISION)
        score = tl.dot(q, tl.trans(own), score, input_precision=PRECISION) * scale
        if MASKED:
            score = tl.where((key < end)[None, :] & (key[None, :] <= query[:, None]), score, float("-inf"))
        higher = tl.maximum(largest, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        old = tl.exp2(largest - higher)
        total = total * old + tl.sum(weight, axis=1)
        values = tl.dot(weight.to(seen.dtype), seen, values * old[:, None], input_precision=PRECISION)
        largest = higher
    return values, largest, total


@launched(do_not_specialize=["first_head", "rows"])
def _attend_prompts(
    q_ptr, q_rope_ptr, k_ptr, v_ptr, latent_ptr, out_ptr, tile_ptr,
    scale, first_head, rows, rank, nope, rope, size, columns, q_token, q_head, rope_token, rope_head, out_token,
    EVEN: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    tile_ptr += 4 * tl.program_id(0)
    held = tl.program_id(1).to(tl.int64)
    head = first_head + tl.program_id(1)
    token = tl.load(tile_ptr)
    count = tl.load(tile_ptr + 1)
    before = tl.load(tile_ptr + 2)  # keys that the tile's first query sees, but for itself
    first_key = tl.load(tile_ptr + 3).to(tl.int64)
    r = tl.arange(0, QUERIES)
    used = (r < count)[:, None]
    token_R = (token + r).to(tl.int64)[:, None]
    d = tl.arange(0, NOPE)[None, :]
    e = tl.arange(0, ROPE)[None, :]
    v = tl.arange(0, SIZE)[None, :]
    q = tl.load(q_ptr + token_R * q_token + head * q_head + d, mask=used & (d < nope), other=0.0)
    rope_at = q_rope_ptr + token_R * rope_token + head * rope_head + e
    q_rope = tl.load(rope_at, mask=used & (e < rope), other=0.0)
    values = tl.zeros((QUERIES, SIZE), dtype=tl.float32)
    largest = tl.full((QUERIES,), LOWEST, dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    query = before + r
    k_ptr += (held * rows + first_key) * nope
    v_ptr += (held * rows + first_key) * size
    shared_ptr = latent_ptr + first_key * columns + rank
    end = before + count
    whole = (before + 1) // KEYS * KEYS  # every query of the tile sees every key before this
    values, largest, total = _attend_keys(
        q, q_rope, values, largest, total, query, 0, whole, k_ptr, v_ptr, shared_ptr, scale * LOG2E, nope, rope, size,
        columns, False, EVEN, KEYS, PRECISION, NOPE, ROPE, SIZE,
    )  # fmt: skip
    values, largest, total = _attend_keys(
        q, q_rope, values, largest, total, query, whole, end, k_ptr, v_ptr, shared_ptr, scale * LOG2E, nope, rope, size,
        columns, True, EVEN, KEYS, PRECISION, NOPE, ROPE, SIZE,
    )  # fmt: skip
    out = values / tl.where(total != 0, total, 1.0)[:, None]
    at = out_ptr + token_R * out_token + head * size + v
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=used & (v < size))


def attend_prompts(
    q_TAD: Tensor, q_rope_TAE: Tensor, k_GMD: Tensor, v_GMD: Tensor, latent_MC: Tensor, first_head: int,
    tile_N4: Tensor, scale: float, tile: AttentionTile, out_TAD: Tensor,
) -> None:  # fmt: skip
    """Of the heads from `first_head` on, what the queries of each tile saw. A row of tile_N4 (int32): the first token,
    how many of at most `tile.queries` tokens, how many keys of their sequence are before the first one, and where in
    latent_MC these begin."""
    (heads, rows, nope), size, (_, columns) = k_GMD.shape, v_GMD.shape[2], latent_MC.shape
    rope = q_rope_TAE.shape[2]
    assert q_TAD.stride(2) == q_rope_TAE.stride(2) == 1, "queries must be contiguous"
    assert all(x.is_contiguous() for x in (k_GMD, v_GMD, latent_MC, tile_N4, out_TAD)), "as they were made"
    widths = [max(16, power_of_two(each)) for each in (nope, rope, size)]
    _attend_prompts[(tile_N4.shape[0], heads)](
        q_TAD, q_rope_TAE, k_GMD, v_GMD, latent_MC, out_TAD, tile_N4,
        scale, first_head, rows, columns - rope, nope, rope, size, columns, *q_TAD.stride()[:2],
        *q_rope_TAE.stride()[:2], out_TAD.stride(0),
        EVEN=widths == [nope, rope, size], QUERIES=tile.queries, KEYS=tile.keys,
        PRECISION="ieee" if k_GMD.dtype is torch.float32 else "tf32",
        NOPE=widths[0], ROPE=widths[1], SIZE=widths[2], num_warps=tile.warps, num_stages=tile.stages, **FUSED,
    )  # fmt: skip


def multiply_up(
    q_TAD: Tensor, q_rope_TAE: Tensor, layer: MlaLayer, cache_NBC: Tensor, prompts: LatentPrompts, tile: AttentionTile,
    out_TAV: Tensor,
) -> None:  # fmt: skip
    """What the tokens of these prompts saw, into their rows of out_TAV; as many heads at a time as scratch holds."""
    up_k, up_v = layer.up_k.weight_AOI, layer.up_v.weight_AOI
    assert up_k is not None and up_v is not None, "PyTorch multiplies heads here"
    latent_MC = gather_latents(cache_NBC, prompts.row_M, layer.rank, q_TAD.dtype)
    rows, heads = len(latent_MC), layer.heads
    together = min(heads, prompts.heads_together(LatentSizes.of(layer, tile.queries), latent_MC.itemsize))
    k_GMD = latent_MC.new_empty((together, rows, layer.nope))
    v_GMV = latent_MC.new_empty((together, rows, layer.value_size))
    for first in range(0, heads, together):
        some = min(together, heads - first)
        ranked = latent_MC[:, : layer.rank].expand(some, -1, -1)
        torch.bmm(ranked, up_k[first : first + some], out=k_GMD[:some])
        torch.bmm(ranked, up_v[first : first + some].transpose(1, 2), out=v_GMV[:some])
        attend_prompts(
            q_TAD, q_rope_TAE, k_GMD[:some], v_GMV[:some], latent_MC, first, prompts.tile_N4, layer.scale, tile, out_TAV
        )  # fmt: skip
