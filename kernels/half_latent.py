"""The attention half of an MLA layer as single ops: what `mla_half` means, and what runs where no fused one fits; and
halves of both kinds in parts, for several devices.

It knows no backend, no device and no queue. Shapes as in `latent.py`, T tokens, J gate over up.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from afserve.kernels.checks import expect_last, expect_shape
from afserve.kernels.formats.eight_bits import is_eight
from afserve.kernels.half import join_half, opened, seen_of_ops
from afserve.kernels.indexer import INDEX_EPS, Indexer, NearRows, as_rows, chosen_batch
from afserve.kernels.latent import BoundMla, MlaLayer
from afserve.kernels.layer import BoundGqa, Half
from afserve.kernels.packed import Gating, PackedLinear
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference


def latent_half_of_ops(ops: Reference, x_TH: Tensor, bound: BoundMla, batch: PagedBatch) -> Half:
    seen_TO = latent_seen_of_ops(ops, x_TH, bound, batch)
    return join_half(ops, x_TH, bound.layer, ops.linear(seen_TO, bound.layer.out))


def latent_seen_of_ops(ops: Reference, x_TH: Tensor, bound: BoundMla, batch: PagedBatch) -> Tensor:
    """What the heads saw, (T, A value); latents are written."""
    layer, cache_NBC = bound.layer, bound.cache_NBC

    def turned(x_TAD: Tensor) -> Tensor:
        if not layer.rope:
            return x_TAD
        return ops.rope(x_TAD, layer.cos_PD, layer.sin_PD, batch.position_T, layer.interleaved)

    tokens, head = x_TH.shape[0], layer.nope + layer.rope
    normed_TH = ops.rms_norm(x_TH, layer.input_norm_H, layer.eps)
    made_TD = ops.linear(normed_TH, layer.down)
    ranked_TR = ops.keep_latents(made_TD, layer, cache_NBC, batch)
    if ranked_TR is None:
        ranked_TR = latents_kept(ops, made_TD, layer, cache_NBC, batch)
    query = ranked_TR
    if bound.near is not None and not layer.borrows:
        bound.near.forget_rows(batch.kv_slot_T)
    if layer.q_up is not None:
        query = ops.linear(ranked_TR, layer.q_up)
    if layer.indexer is not None:
        batch.chosen.rows = _choose(ops, normed_TH, ranked_TR, layer.indexer, bound, batch)
    if layer.steps.q_scale_P is not None:
        query = (query * layer.steps.q_scale_P[batch.position_T][:, None]).to(query.dtype)
    q_TAD = query.view(tokens, layer.heads, head)
    if layer.steps.log_scale is not None:
        q_TAD = (q_TAD * layer.steps.log_scale.at(batch.position_T)).to(q_TAD.dtype)
    q_nope = q_TAD.narrow(2, 0, layer.nope)
    # before `batch` is that of rows, whose positions are others
    q_rope = turned(q_TAD.narrow(2, layer.nope, layer.rope))
    rows = batch.chosen.rows if layer.indexer is not None or layer.reuses else None
    if rows is None:
        seen_TAV = ops.attend_latent(q_nope, q_rope, layer, cache_NBC, batch)
    elif bound.near is None:
        seen_TAV = ops.attend_latent(q_nope, q_rope, layer, as_rows(cache_NBC), rows)
    else:
        seen_TAV = _near_seen(ops, q_nope, q_rope, layer, bound.near, rows)
    return opened(ops, normed_TH, seen_TAV, layer.steps).reshape(tokens, -1)


def _near_seen(
    ops: Reference, q_TAD: Tensor, q_rope_TAE: Tensor, layer: MlaLayer, near: NearRows, rows: PagedBatch
) -> Tensor:
    """What was chosen, attended where it is near."""
    seen = []
    for part, some in near.parts_of(rows):
        some = replace(some, block_table_SB=near.fetch_rows(some))
        seen.append(ops.attend_latent(q_TAD[part], q_rope_TAE[part], layer, near.as_cache, some))
    return seen[0] if len(seen) == 1 else torch.cat(seen)


def latents_kept(
    ops: Reference, made_TD: Tensor, layer: MlaLayer, cache_NBC: Tensor, batch: PagedBatch
) -> Tensor:
    """(T, R) of what `layer.down` made: the query's part, normed where it has a norm. Latents, normed, and their keys,
    turned, are written, unless the layer borrows them."""
    query = made_TD[:, : layer.query]
    if not layer.borrows:
        _, latent_TC, k_rope = made_TD.split((layer.query, layer.rank, layer.rope), 1)
        latent_TC = ops.rms_norm(latent_TC, layer.latent_norm_C, layer.latent_eps)
        if layer.rope:
            angles = layer.cos_PD, layer.sin_PD, batch.position_T
            k_rope = ops.rope(k_rope.unsqueeze(1), *angles, layer.interleaved).squeeze(1)
        ops.write_latent(torch.cat((latent_TC, k_rope), 1), cache_NBC, batch.kv_slot_T, layer.rank)
    return query if layer.q_norm_R is None else ops.rms_norm(query, layer.q_norm_R, layer.latent_eps)


def _choose(
    ops: Reference, normed_TH: Tensor, ranked_TR: Tensor, indexer: Indexer, bound: BoundMla, batch: PagedBatch
) -> PagedBatch | None:
    """What each token attends, None for all that it sees: the native library's bits are those of all being chosen.
    Where rows have to be fetched all of them are chosen, too. The tokens' own index keys are written."""
    layer, index_NBI = bound.layer, bound.index_NBI
    assert index_NBI is not None, "checked when it was bound"

    def turned(x_TJI: Tensor) -> Tensor:
        if not layer.rope:
            return x_TJI
        rope = x_TJI[:, :, : layer.rope]
        rope = ops.rope(rope, layer.cos_PD, layer.sin_PD, batch.position_T, indexer.interleaved)
        return torch.cat((rope, x_TJI[:, :, layer.rope :]), 2)

    key_TI = ops.layer_norm(ops.linear(normed_TH, indexer.keys), indexer.norm_I, indexer.bias_I, INDEX_EPS)
    ops.write_latent(turned(key_TI.unsqueeze(1)).squeeze(1), index_NBI, batch.kv_slot_T, indexer.dim)
    fetched = bound.near is not None or is_eight(index_NBI.dtype)
    if batch.max_context <= indexer.top and not fetched:
        return None
    own = indexer.own
    if own is not None:
        ranked_TR = ops.layer_norm(normed_TH, own.norm_H, own.norm_bias_H, INDEX_EPS)
    q_TJI = turned(ops.linear(ranked_TR, indexer.queries).unflatten(1, (indexer.heads, indexer.dim)))
    if own is not None:
        q_TJI = (q_TJI * own.scale.at(batch.position_T)).to(q_TJI.dtype)
    weight_TJ = ops.logits(normed_TH, indexer.weights) * indexer.scale
    slot_TK = ops.choose_rows(q_TJI, weight_TJ, index_NBI, batch, indexer.top)
    return chosen_batch(batch, slot_TK, indexer.top)


class DeviceParts:
    """The door for what each device adds to the residual stream, float32 (T, H) of the heads or inner numbers that it
    has, for the sum of that, and for what is behind it. `Ops` has its methods."""

    def __init__(self, backend: Reference) -> None:
        self._backend = backend

    def gqa_part(self, x_TH: Tensor, bound: BoundGqa, batch: PagedBatch) -> Tensor:
        """Of a layer with grouped heads. x_TH stays as it is."""
        seen_TAD = seen_of_ops(self._backend, x_TH, bound, batch)
        return self._backend.logits(seen_TAD.flatten(1), bound.layer.out)

    def mla_part(self, x_TH: Tensor, bound: BoundMla, batch: PagedBatch) -> Tensor:
        """Of a layer with a latent."""
        seen_TO = latent_seen_of_ops(self._backend, x_TH, bound, batch)
        return self._backend.logits(seen_TO, bound.layer.out)

    def mlp_part(self, x_TH: Tensor, gate_up: PackedLinear, down: PackedLinear, gating: Gating) -> Tensor:
        """Of a dense FFN or a shared expert."""
        expect_last("x_TH", x_TH, gate_up.inputs)
        joined_TI = self._backend.steps.join_rows(gating, self._backend.linear(x_TH, gate_up))
        return self._backend.logits(joined_TI, down)

    def add_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Those of several devices, in the memory of each, on the first one's: the first two added, then the third, and
        so on, so that a row has the same sum in every batch. The caller puts the devices' queues in order."""
        for part_TH in parts:
            expect_shape("parts", part_TH, parts[0].shape)
        return self._backend.add_parts(parts)

    def join_half(self, x_TH: Tensor, bound: BoundGqa | BoundMla, attended_TH: Tensor) -> Half:
        """An attention half from its output projection on: `attended_TH`, rounded once, is added to x_TH in place; then
        norm and router."""
        expect_shape("attended_TH", attended_TH, x_TH.shape)
        return join_half(self._backend, x_TH, bound.layer, attended_TH.to(x_TH.dtype))
