"""The attention half of an MLA layer as single ops: what `mla_half` means, and what runs where no fused one fits.

It knows no backend. Shapes as in `latent.py`, T tokens.
"""

import torch
from torch import Tensor

from afserve.kernels.latent import BoundMla, MlaLayer
from afserve.kernels.layer import Half
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference


def latent_half_of_ops(ops: Reference, x_TH: Tensor, bound: BoundMla, batch: PagedBatch) -> Half:
    layer = bound.layer
    normed_TH = ops.rms_norm(x_TH, layer.input_norm_H, layer.eps)
    attended_TH = _attended(ops, normed_TH, layer, bound.cache_NBC, batch)
    normed_TH = ops.add_rms_norm(x_TH, attended_TH, layer.post_norm_H, layer.eps)
    if layer.gate_EH is None or layer.rule is None:
        return Half(normed_TH, None, None)
    routed = ops.route(normed_TH, layer.gate_EH, layer.bias_E, layer.rule, layer.gate_bias_E)
    return Half(normed_TH, *routed)


def _attended(ops: Reference, x_TH: Tensor, layer: MlaLayer, cache_NBC: Tensor, batch: PagedBatch) -> Tensor:
    def turned(x_TAD: Tensor) -> Tensor:
        return ops.rope(x_TAD, layer.cos_PD, layer.sin_PD, batch.position_T, layer.interleaved)

    tokens, head = x_TH.shape[0], layer.nope + layer.rope
    query, latent_TC, k_rope = ops.linear(x_TH, layer.down).split((layer.query, layer.rank, layer.rope), 1)
    if layer.q_up is not None and layer.q_norm_R is not None:
        query = ops.linear(ops.rms_norm(query, layer.q_norm_R, layer.latent_eps), layer.q_up)
    q_nope, q_rope = query.view(tokens, layer.heads, head).split((layer.nope, layer.rope), 2)
    latent_TC = ops.rms_norm(latent_TC, layer.latent_norm_C, layer.latent_eps)
    k_rope = turned(k_rope.unsqueeze(1)).squeeze(1)
    ops.write_latent(torch.cat((latent_TC, k_rope), 1), cache_NBC, batch.kv_slot_T)
    q_TAC = torch.cat((ops.linear_heads(q_nope, layer.up_k), turned(q_rope)), 2)
    seen_TAC = ops.attend_mla(q_TAC, cache_NBC, layer.rank, batch, layer.scale)
    return ops.linear(ops.linear_heads(seen_TAC, layer.up_v).reshape(tokens, -1), layer.out)
