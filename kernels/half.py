"""The attention half of a GQA layer as single ops: what `gqa_half` means, and what runs where no fused one fits.

It knows no backend. Shapes as in `ops.py`.
"""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from afserve.kernels.indexer import BlockIndexer, chosen_blocks, head_rows
from afserve.kernels.latent import MlaLayer
from afserve.kernels.layer import BoundGqa, GqaLayer, Half, Steps
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference
from afserve.kernels.tiled import shape_of


def half_of_ops(ops: Reference, x_TH: Tensor, bound: BoundGqa, batch: PagedBatch) -> Half:
    return routed_half(ops, x_TH, bound.layer, seen_of_ops(ops, x_TH, bound, batch))


def seen_of_ops(ops: Reference, x_TH: Tensor, bound: BoundGqa, batch: PagedBatch) -> Tensor:
    """What the heads saw, (T, A, D); keys and values are written."""
    layer, k_NGBD, v_NGBD = bound.layer, bound.k_NGBD, bound.v_NGBD
    normed_TH = _normed(ops, x_TH, layer)
    q, k, v = _heads(ops, normed_TH, layer)
    if layer.steps.v_norm_D is not None:
        v = ops.rms_norm(v, layer.steps.v_norm_D, layer.eps)
    if not layer.steps.late:
        q, k = _head_norms(ops, q, k, layer)
    angles = batch.turns or (layer.cos_PD, layer.sin_PD, batch.position_T)
    q, k = ops.rope(q, *angles, False), ops.rope(k, *angles, False)
    if layer.steps.late:
        q, k = _head_norms(ops, q, k, layer)
    if layer.steps.q_scale_P is not None:
        q = (q * layer.steps.q_scale_P[batch.position_T][:, None, None]).to(q.dtype)
    ops.write_kv(k, v, k_NGBD, v_NGBD, batch.kv_slot_T)
    if layer.steps.chunk is not None:
        batch = cut(batch, layer.steps.chunk, shape_of(k_NGBD)[2])
    rows = None
    if layer.steps.blocks is not None:
        rows = _choose(ops, normed_TH, layer.steps.blocks, bound, batch)
    if rows is None:
        seen = ops.attend_gqa(q, k_NGBD, v_NGBD, batch, layer.scale, layer.window, layer.sink_A)
    else:
        q_SAD = q.unflatten(1, (layer.groups, -1)).flatten(0, 1)
        k_XD, v_XD = head_rows(k_NGBD), head_rows(v_NGBD)
        seen = ops.attend_gqa(q_SAD, k_XD, v_XD, rows, layer.scale, None).view(q.shape)
    return opened(ops, normed_TH, seen, layer.steps)


def opened(ops: Reference, normed_TH: Tensor, seen_TAD: Tensor, steps: Steps) -> Tensor:
    """What heads saw behind their gate, where there is one."""
    if steps.gate is None:
        return seen_TAD
    return ops.steps.open_rows(seen_TAD, ops.linear(normed_TH, steps.gate), softplus=steps.softplus)


def _choose(
    ops: Reference, normed_TH: Tensor, of: BlockIndexer, bound: BoundGqa, batch: PagedBatch
) -> PagedBatch | None:
    """What each key head of each token attends, None for all that it sees. The tokens' index keys are written."""
    layer, index_NBI = bound.layer, bound.index_NBI
    assert index_NBI is not None, "a layer with an indexer of blocks is bound with a cache of its keys"
    half = of.turned // 2
    cos, sin = (table[batch.position_T, :half] for table in (layer.cos_PD, layer.sin_PD))
    row_T = torch.arange(len(normed_TH), device=normed_TH.device)

    def turned(x_TGI: Tensor) -> Tensor:
        first = ops.rope(x_TGI[..., : of.turned].contiguous(), cos, sin, row_T, False)
        return torch.cat((first, x_TGI[..., of.turned :]), 2)

    key_TI = ops.rms_norm(ops.linear(normed_TH, of.keys), of.k_norm_I, layer.eps)
    ops.write_latent(turned(key_TI.unsqueeze(1)).squeeze(1), index_NBI, batch.kv_slot_T, of.dim)
    if batch.max_context <= of.reach:
        return None
    q_TGI = ops.linear(normed_TH, of.queries).unflatten(1, (of.heads, of.dim))
    return chosen_blocks(turned(ops.rms_norm(q_TGI, of.q_norm_I, layer.eps)), index_NBI, batch, of)


def _normed(ops: Reference, x_TH: Tensor, layer: GqaLayer | MlaLayer) -> Tensor:
    if layer.steps.centred:
        return ops.layer_norm(x_TH, layer.input_norm_H, layer.steps.input_bias_H, layer.eps)
    return ops.rms_norm(x_TH, layer.input_norm_H, layer.eps)


def _heads(ops: Reference, normed_TH: Tensor, layer: GqaLayer) -> tuple[Tensor, Tensor, Tensor]:
    """(T, A, D), (T, G, D) and (T, G, D): queries, keys and values before norms of heads and rotary embedding."""
    heads, groups, size = layer.heads, layer.groups, layer.head_dim
    qkv = ops.linear(normed_TH, layer.qkv)
    q, k, v = qkv.split((heads * size, groups * size, groups * size), dim=1)
    if layer.wide_norms and layer.q_norm_D is not None and layer.k_norm_D is not None:
        q = ops.rms_norm(q, layer.q_norm_D, layer.eps)
        k = ops.rms_norm(k, layer.k_norm_D, layer.eps)
    if layer.steps.clip is not None:
        q, k, v = (part.clamp(-layer.steps.clip, layer.steps.clip) for part in (q, k, v))
    return q.unflatten(1, (heads, size)), k.unflatten(1, (groups, size)), v.unflatten(1, (groups, size))


def _head_norms(ops: Reference, q_TAD: Tensor, k_TGD: Tensor, layer: GqaLayer) -> tuple[Tensor, Tensor]:
    if layer.q_norm_D is None or layer.k_norm_D is None or layer.wide_norms:
        return q_TAD, k_TGD
    return ops.rms_norm(q_TAD, layer.q_norm_D, layer.eps), ops.rms_norm(k_TGD, layer.k_norm_D, layer.eps)


def routed_half(ops: Reference, x_TH: Tensor, layer: GqaLayer, seen_TAD: Tensor) -> Half:
    """From what the heads saw: output projection, residual, norm, router."""
    return join_half(ops, x_TH, layer, ops.linear(seen_TAD.flatten(1), layer.out))


def join_half(ops: Reference, x_TH: Tensor, layer: GqaLayer | MlaLayer, attended_TH: Tensor) -> Half:
    """From what attention adds: residual, norm, router."""
    if layer.steps.after_norm_H is not None:
        attended_TH = ops.rms_norm(attended_TH, layer.steps.after_norm_H, layer.eps)
    if layer.steps.parallel:
        normed = _normed(ops, x_TH, layer)
        x_TH += attended_TH
    elif layer.steps.centred:
        x_TH += attended_TH
        normed = ops.layer_norm(x_TH, layer.post_norm_H, layer.steps.post_bias_H, layer.eps)
    else:
        normed = ops.add_rms_norm(x_TH, attended_TH, layer.post_norm_H, layer.eps)
    if layer.gate_EH is None or layer.rule is None:
        return Half(normed, None, None)
    steps, read = layer.steps, normed
    if steps.router_norm_H is not None:
        read = ops.rms_norm(x_TH, steps.router_norm_H, layer.eps)
    expert_TK, weight_TK = ops.route(read, layer.gate_EH, layer.bias_E, layer.rule, layer.gate_bias_E)
    if steps.expert_scale_E is not None:
        weight_TK = weight_TK * steps.expert_scale_E[expert_TK.long()]
    return Half(normed, expert_TK, weight_TK)


def cut(batch: PagedBatch, chunk: int, block_size: int) -> PagedBatch:
    """The same tokens as more and shorter sequences, every part of one inside of an aligned chunk for itself; the batch
    itself where no context leaves its first chunk. A part sees the keys from the beginning of its chunk, where its
    context and its block table begin.

    `chunk` must be a multiple of the block size. Positions and KV slots stay those of the whole sequences.
    """
    assert chunk % block_size == 0, "Ops.bind_gqa refuses it"
    starts = batch.starts or tuple(batch.query_start_S1.tolist())
    contexts = batch.contexts or tuple(batch.context_S.tolist())
    if max(contexts, default=0) <= chunk:
        return batch
    ends, seen, rows, first_blocks = [0], [], [], []
    for row, context in enumerate(contexts):
        queries = starts[row + 1] - starts[row]
        position = context - queries
        while position < context:
            begin = position // chunk * chunk
            stop = min(begin + chunk, context)
            ends.append(ends[-1] + stop - position)
            seen.append(stop - begin)
            rows.append(row)
            first_blocks.append(begin // block_size)
            position = stop
    device = batch.context_S.device
    return replace(
        batch,
        query_start_S1=torch.tensor(ends, dtype=torch.int32, device=device),
        context_S=torch.tensor(seen, dtype=torch.int32, device=device),
        block_table_SB=_shifted(batch.block_table_SB, rows, first_blocks),
        max_query=max(end - start for start, end in pairwise(ends)),
        max_context=max(seen),
        starts=tuple(ends),
        contexts=tuple(seen),
    )


def _shifted(table_SB: Tensor, rows: list[int], first_blocks: list[int]) -> Tensor:
    """Row i is row rows[i] of the table from block first_blocks[i] on; entries past the end are never read."""
    device, width = table_SB.device, table_SB.shape[1]
    first_S1 = torch.tensor(first_blocks, device=device)[:, None]
    column_SB = (first_S1 + torch.arange(width, device=device)).clamp(max=width - 1)
    return table_SB[torch.tensor(rows, device=device)].gather(1, column_SB).contiguous()
