"""The routed experts' SwiGLU over rows sorted by expert, with a hand-written backward pass.

Knows no router. Letters: T tokens, K choices, R = T x K rows, E experts, H hidden, M inner width.
The weight of a row multiplies its inner activations, so the K rows of a token only have to be summed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PAD = 64


class RoutedExperts(torch.autograd.Function):
    """y[t] = sum over k of weight[t, k] * expert[t, k](x[t])."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EMH: Tensor, down_EHM: Tensor
    ) -> Tensor:
        token_R, place_TK, counts = _layout(expert_TK, gate_up_EMH.shape[0])
        x_RH = x_TH.index_select(0, token_R)
        weight_R = x_TH.new_zeros(token_R.numel())
        weight_R[place_TK.view(-1)] = weight_TK.view(-1).to(x_TH.dtype)
        both_RM = _each(x_RH, gate_up_EMH, counts)
        inner_RM = swiglu(both_RM, weight_R)
        y_RH = _each(inner_RM, down_EHM, counts)
        ctx.save_for_backward(x_RH, both_RM, inner_RM, weight_R, gate_up_EMH, down_EHM, token_R, place_TK)
        ctx.counts = counts
        return F.embedding_bag(place_TK, y_RH, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, Tensor, Tensor, Tensor]:
        x_RH, both_RM, inner_RM, weight_R, gate_up, down, token_R, place_TK = ctx.saved_tensors
        grad_RH = grad_TH.index_select(0, token_R)
        dinner_RM = _each(grad_RH, down.transpose(1, 2), ctx.counts)
        d_down = _each_outer(grad_RH, inner_RM, ctx.counts)
        dboth_RM, dweight_R = swiglu_backward(both_RM, weight_R, dinner_RM)
        d_gate_up = _each_outer(dboth_RM, x_RH, ctx.counts)
        dx_RH = _each(dboth_RM, gate_up.transpose(1, 2), ctx.counts)
        dx_TH = F.embedding_bag(place_TK, dx_RH, mode="sum")
        return (
            dx_TH,
            None,
            dweight_R.index_select(0, place_TK.reshape(-1)).view_as(place_TK),
            d_gate_up,
            d_down,
        )


def swiglu(both_RM: Tensor, weight_R: Tensor) -> Tensor:
    """silu(gate) * up * weight; `both` holds gate then up."""
    gate_RM, up_RM = both_RM.float().chunk(2, -1)
    return (F.silu(gate_RM) * up_RM * weight_R[:, None]).to(both_RM.dtype)


def swiglu_backward(both_RM: Tensor, weight_R: Tensor, grad_RM: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `both` and of `weight` (float32)."""
    gate_RM, up_RM = both_RM.float().chunk(2, -1)
    sigmoid_RM = torch.sigmoid(gate_RM)
    silu_RM = gate_RM * sigmoid_RM
    dweight_R = (grad_RM * silu_RM * up_RM).sum(-1)
    dinner_RM = grad_RM.float() * weight_R[:, None]
    dgate_RM = dinner_RM * up_RM * (sigmoid_RM + silu_RM * (1 - sigmoid_RM))
    return torch.cat([dgate_RM, dinner_RM * silu_RM], -1).to(both_RM.dtype), dweight_R


def _layout(expert_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, list[int]]:
    """Rows grouped by expert, each group padded to a multiple of PAD with rows of token 0 and weight 0.

    Matrix libraries compile a kernel per shape: a few shapes seen often cost far less than a new one each time.
    """
    chosen = expert_TK.reshape(-1)
    counts = torch.bincount(chosen, minlength=experts)
    padded = (counts + PAD - 1) // PAD * PAD
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    order = torch.argsort(chosen, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel()) + shift.index_select(0, chosen.index_select(0, order))
    token_R = torch.zeros(int(padded.sum()), dtype=torch.long)
    token_R[place] = torch.arange(order.numel()) // expert_TK.shape[1]
    return token_R, place.view_as(expert_TK), padded.tolist()


def _each(x_RI: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
    """x @ weight[e]^T for each expert's rows."""
    out_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            torch.mm(x_RI[rows], weight_EOI[expert].t(), out=out_RO[rows])
        start += count
    return out_RO


def _each_outer(a_RO: Tensor, b_RI: Tensor, counts: list[int]) -> Tensor:
    """a^T @ b over each expert's rows: the gradient of its weight."""
    out_EOI = a_RO.new_zeros(len(counts), a_RO.shape[1], b_RI.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            torch.mm(a_RO[rows].t(), b_RI[rows], out=out_EOI[expert])
        start += count
    return out_EOI
