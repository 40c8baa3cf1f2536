"""The attention half of a GQA layer as single ops: what `gqa_half` means, and what runs where no fused one fits.

It knows no backend. Shapes as in `ops.py`.
"""

from torch import Tensor

from afserve.kernels.backend import Backend
from afserve.kernels.layer import BoundGqa, GqaLayer, Half
from afserve.kernels.paged import PagedBatch


def half_of_ops(ops: Backend, x_TH: Tensor, bound: BoundGqa, batch: PagedBatch) -> Half:
    layer, k_NGBD, v_NGBD = bound.layer, bound.k_NGBD, bound.v_NGBD
    heads, groups = layer.heads, layer.groups
    normed = ops.rms_norm(x_TH, layer.input_norm_H, layer.eps)
    qkv = ops.linear(normed, layer.qkv).view(-1, heads + 2 * groups, layer.head_dim)
    q, k, v = qkv.split((heads, groups, groups), dim=1)
    if layer.q_norm_D is not None:
        q = ops.rms_norm(q, layer.q_norm_D, layer.eps)
    if layer.k_norm_D is not None:
        k = ops.rms_norm(k, layer.k_norm_D, layer.eps)
    q = ops.rope(q, layer.cos_PD, layer.sin_PD, batch.position_T, False)
    k = ops.rope(k, layer.cos_PD, layer.sin_PD, batch.position_T, False)
    ops.write_kv(k, v, k_NGBD, v_NGBD, batch.kv_slot_T)
    seen = ops.attend_gqa(q, k_NGBD, v_NGBD, batch, layer.scale, layer.window, layer.sink_A)
    return routed_half(ops, x_TH, layer, seen)


def routed_half(ops: Backend, x_TH: Tensor, layer: GqaLayer, seen_TAD: Tensor) -> Half:
    """From what the heads saw: output projection, residual, norm, router."""
    attended = ops.linear(seen_TAD.flatten(1), layer.out)
    normed = ops.add_rms_norm(x_TH, attended, layer.post_norm_H, layer.eps)
    if layer.gate_EH is None or layer.rule is None:
        return Half(normed, None, None)
    return Half(normed, *ops.route(normed, layer.gate_EH, layer.bias_E, layer.rule))
