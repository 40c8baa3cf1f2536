"""Routed experts in plain PyTorch, the oracle of every backend's `route` and `expert_ffn`: how a router's logits become
experts, and the weighted sums of their FFNs, slot by slot on a CPU, choice by choice on other devices.

Sums are added to `total_RH`, float32. Shapes: T tokens, R rows, H hidden, E experts, K top-k.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.kernels.packed import PackedExperts
from afserve.kernels.routing import RouterRule, Scoring, Selection

GATHERED = 256 << 20  # bytes of weights that experts off the CPU copy at a time


def choose(logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    """(expert_TK int32, weight_TK float32) by the family's rule. Sources: the transformers modules that
    FIELD.md's table names; ties go to the lower expert id, as torch.topk on CPU does for distinct values.

    Where logits are not finite, or the bias holds a NaN, nothing can be chosen: experts 0 .. K - 1, weights NaN.
    """
    if rule.scoring is Scoring.SPARSE_MIXER:
        mixed_TK, weight_TK = _mix(logits_TE, rule.jitter)
        return mixed_TK, weight_TK * rule.scale
    if rule.scoring is Scoring.SIGMOID:
        score_TE = logits_TE.sigmoid()
    elif rule.scoring is Scoring.SOFTMAX:
        score_TE = logits_TE.softmax(-1)
    else:
        score_TE = logits_TE
    ranked_TE = score_TE if bias_E is None else score_TE + bias_E.float()
    if rule.groups > 1 and rule.selection is not Selection.PLAIN:
        ranked_TE = ranked_TE.masked_fill(~_open_groups(ranked_TE, rule), rule.closed_value)
    expert_TK = ranked_TE.topk(rule.top_k, dim=-1, sorted=True).indices
    weight_TK = score_TE.gather(1, expert_TK)
    if rule.scoring is Scoring.TOPK_SOFTMAX:
        weight_TK = weight_TK.softmax(-1)
    if rule.renormalise:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + rule.epsilon)
    lost_T1 = ~logits_TE.isfinite().all(-1, keepdim=True)
    if bias_E is not None:
        lost_T1 |= bias_E.isnan().any()
    first_K = torch.arange(rule.top_k, device=expert_TK.device)
    expert_TK = torch.where(lost_T1, first_K, expert_TK)
    return expert_TK.int(), (weight_TK * rule.scale).masked_fill(lost_T1, float("nan"))


def _mix(logits_TE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Phi's sparse mixer (arXiv 2409.12136): the best expert, then the best of the others. Each has its weight from a
    softmax over what is left and within 2 jitter of it, relative to the larger of its value and a logit's size."""
    left_TE, experts, weights = logits_TE, [], []
    for _ in range(2):
        best_T1, expert_T1 = left_TE.max(-1, keepdim=True)
        far_TE = (best_T1 - logits_TE) / logits_TE.abs().clamp(min=best_T1) > 2 * jitter
        weights.append(left_TE.masked_fill(far_TE, float("-inf")).softmax(-1).gather(1, expert_T1))
        experts.append(expert_T1)
        left_TE = left_TE.scatter(1, expert_T1, float("-inf"))
    lost_T1 = ~logits_TE.isfinite().all(-1, keepdim=True)
    first_K = torch.arange(2, device=logits_TE.device)
    expert_TK = torch.where(lost_T1, first_K, torch.cat(experts, 1))
    return expert_TK.int(), torch.cat(weights, 1).masked_fill(lost_T1, float("nan"))


def _open_groups(ranked_TE: Tensor, rule: RouterRule) -> Tensor:
    tokens, experts = ranked_TE.shape
    grouped = ranked_TE.view(tokens, rule.groups, experts // rule.groups)
    if rule.selection is Selection.GROUP_TOP2_SUM:
        value = grouped.topk(2, dim=-1).values.sum(-1)
    else:
        value = grouped.amax(-1)
    keep = torch.zeros_like(value, dtype=torch.bool)
    keep.scatter_(1, value.topk(rule.top_groups, dim=-1).indices, True)
    return keep.unsqueeze(-1).expand_as(grouped).reshape(tokens, experts)


def sums_by_slot(
    x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, experts: PackedExperts, total_RH: Tensor
) -> None:
    """Adds every expert's part, one slot after the other with all of its rows."""
    assert experts.gate_up_EJH is not None and experts.down_EHI is not None
    for slot in torch.unique(slot_RK).tolist():
        if slot < 0:
            continue
        row, choice = torch.where(slot_RK == slot)
        place = experts.place_of(slot)
        up_bias_J = None if experts.gate_up_bias_EJ is None else experts.gate_up_bias_EJ[slot]
        down_bias_H = None if experts.down_bias_EH is None else experts.down_bias_EH[slot]
        both = F.linear(x_RH[row], experts.gate_up_EJH[place], up_bias_J)
        y = F.linear(experts.gating.join(both), experts.down_EHI[place], down_bias_H).float()
        part = y * weight_RK[row, choice].float()[:, None]
        total_RH.index_add_(0, row, part.to(x_RH.dtype).float())


def sums_by_choice(
    x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, experts: PackedExperts, total_RH: Tensor
) -> None:
    """The same without a shape that depends on the slots: every row fetches the weights of its k-th expert. It reads
    them once per row, so it is for devices that a read of the slots would stop, and where nothing faster runs."""
    assert experts.gate_up_EJH is not None and experts.down_EHI is not None
    held = (experts.joined + experts.inner) * experts.hidden * experts.gate_up_EJH.element_size()
    step = max(1, GATHERED // max(1, held))
    for k in range(slot_RK.shape[1]):
        for first in range(0, x_RH.shape[0], step):
            rows = slice(first, first + step)
            slot = slot_RK[rows, k].long()
            safe = slot.clamp(min=0)
            both = torch.bmm(experts.gate_up_EJH[safe], x_RH[rows].unsqueeze(2)).squeeze(2)
            if experts.gate_up_bias_EJ is not None:
                both = both + experts.gate_up_bias_EJ[safe]
            joined = experts.gating.join(both)
            y = torch.bmm(experts.down_EHI[safe], joined.unsqueeze(2)).squeeze(2).float()
            if experts.down_bias_EH is not None:
                y = y + experts.down_bias_EH[safe].float()
            part = (y * weight_RK[rows, k].float()[:, None]).to(x_RH.dtype).float()
            total_RH[rows] += part.masked_fill((slot < 0)[:, None], 0.0)
