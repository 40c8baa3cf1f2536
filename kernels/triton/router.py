"""Triton router: scores in float32, then the family's choice of experts (`routing.RouterRule`) and their weights.

Two launches: products split along the hidden size (a decode batch alone would fill few multiprocessors), then one
program per token adds the parts in a fixed order and chooses. Ties go to the lower expert id. A token whose logits are
not all finite gets experts 0 .. K - 1 and weights that are NaN.
Shapes: T tokens, H hidden, E experts, K choices, S parts of H.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.routing import RouterRule, Scoring, Selection
from afserve.kernels.triton.config import FUSED, RouterTile
from afserve.kernels.triton.launch import PreparedLaunch, cdiv, launched, planned, power_of_two

LOWEST = tl.constexpr(-1.0e38)  # below every score, above what has been taken; twice it is still finite


@launched(do_not_specialize=["tokens"])
def _score_part(
    x_ptr, gate_ptr, part_STE_ptr, tokens, hidden, experts, x_stride, span,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    k = part * span + tl.arange(0, DEPTH)
    end = tl.minimum(part * span + span, hidden)
    x_at = x_ptr + t.to(tl.int64)[:, None] * x_stride
    gate_at = gate_ptr + e[None, :] * hidden
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, span, DEPTH):
        at = k + start
        x = tl.load(x_at + at[None, :], mask=(t[:, None] < tokens) & (at[None, :] < end), other=0.0)
        gate = tl.load(gate_at + at[:, None], mask=(e[None, :] < experts) & (at[:, None] < end), other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            gate = gate.to(tl.float32)
        total = tl.dot(x, gate, total, input_precision="ieee")
    to = part_STE_ptr + (part * tokens + t).to(tl.int64)[:, None] * experts + e[None, :]
    tl.store(to, total, mask=(t[:, None] < tokens) & (e[None, :] < experts))


@triton.jit
def _open_groups(ranked, group, each, TOP2: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Which groups stay: the best TOP_GROUPS by their best score or by the sum of their two best."""
    value = tl.max(ranked, axis=1)
    if TOP2:
        first = tl.argmax(ranked, axis=1)
        value += tl.max(tl.where(each == first[:, None], LOWEST, ranked), axis=1)
    is_open = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = group == tl.argmax(value, axis=0)
        is_open = is_open | best
        value = tl.where(best, float("-inf"), value)
    return is_open


@launched(do_not_specialize=["tokens"])
def _choose(
    part_STE_ptr, bias_ptr, expert_ptr, weight_ptr, tokens, experts, epsilon, scale, closed,
    GROUPS: tl.constexpr, EACH: tl.constexpr, EACH_PADDED: tl.constexpr, PARTS: tl.constexpr,
    SIGMOID: tl.constexpr, SOFTMAX: tl.constexpr, GROUPED: tl.constexpr, TOP2: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    each = tl.arange(0, EACH_PADDED)[None, :]
    e = group[:, None] * EACH + each
    inside = (each < EACH) & (e < experts)
    logit = tl.zeros((GROUPS, EACH_PADDED), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        logit += tl.load(part_STE_ptr + (part * tokens + token) * experts + e, mask=inside, other=0.0)
    fine = tl.abs(logit) < float("inf")  # which NaN is not either
    if SIGMOID:
        score = tl.sigmoid(logit)
    elif SOFTMAX:
        largest = tl.max(tl.max(tl.where(inside, logit, float("-inf")), axis=1), axis=0)
        score = tl.where(inside, tl.exp(logit - largest), 0.0)
        score = score / tl.sum(tl.sum(score, axis=1), axis=0)
    else:
        score = logit
    ranked = score
    if bias_ptr is not None:
        ranked += tl.load(bias_ptr + e, mask=inside, other=0.0).to(tl.float32)
    fine = fine & ((ranked > LOWEST) | (ranked <= LOWEST))  # no NaN of the bias's
    lost = tl.min(tl.min(fine.to(tl.int32), axis=1), axis=0) == 0  # nothing to choose by
    ranked = tl.where(
        ranked > LOWEST, ranked, LOWEST
    )  # NaN and -inf too: they are chosen last, but never twice
    if GROUPED:
        is_open = _open_groups(tl.where(inside, ranked, float("-inf")), group, each, TOP2, TOP_GROUPS)
        ranked = tl.where(is_open[:, None], ranked, tl.maximum(closed, LOWEST))
    ranked = tl.reshape(tl.where(inside, ranked, float("-inf")), (GROUPS * EACH_PADDED,))
    score = tl.reshape(score, (GROUPS * EACH_PADDED,))
    e = tl.reshape(tl.minimum(e, experts - 1), (GROUPS * EACH_PADDED,))  # in range whatever the scores are
    lane = tl.arange(0, GROUPS * EACH_PADDED)
    k = tl.arange(0, CHOICES)
    expert_K = tl.zeros((CHOICES,), dtype=tl.int32)
    weight_K = tl.zeros((CHOICES,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        taken = lane == tl.argmax(ranked, axis=0)
        expert_K = tl.where(k == choice, tl.sum(tl.where(taken, e, 0), axis=0), expert_K)
        weight_K = tl.where(k == choice, tl.sum(tl.where(taken, score, 0.0), axis=0), weight_K)
        ranked = tl.where(taken, float("-inf"), ranked)
    kept = k < TOP_K
    if not SIGMOID and not SOFTMAX:
        largest = tl.max(tl.where(kept, weight_K, float("-inf")), axis=0)
        weight_K = tl.where(kept, tl.exp(weight_K - largest), 0.0)
        weight_K = weight_K / tl.sum(weight_K, axis=0)
    if RENORMALISE:
        weight_K = weight_K / (tl.sum(weight_K, axis=0) + epsilon)
    expert_K = tl.where(lost, k, expert_K)
    weight_K = tl.where(lost, float("nan"), weight_K)
    tl.store(expert_ptr + token * TOP_K + k, expert_K, mask=kept)
    tl.store(weight_ptr + token * TOP_K + k, weight_K * scale, mask=kept)


def route(
    x_TH: Tensor, gate_EH: Tensor, bias_E: Tensor | None, rule: RouterRule, tile: RouterTile
) -> tuple[Tensor, Tensor]:
    """expert_TK int32 and weight_TK float32; the meaning is `reference.choose`'s."""
    return choose(scores(x_TH, gate_EH, tile), bias_E, rule)


def scores(x_TH: Tensor, gate_EH: Tensor, tile: RouterTile) -> Tensor:
    """x @ gate^T in float32, as S parts that add up to it."""
    if x_TH.stride(1) != 1:
        x_TH = x_TH.contiguous()
    widen = x_TH.dtype != gate_EH.dtype
    shape, score = _scoring(x_TH.shape, x_TH.stride(0), gate_EH.shape[0], widen, tile)
    part_STE = x_TH.new_empty(*shape, dtype=torch.float32)
    if shape[1]:
        score(x_TH, gate_EH.contiguous(), part_STE)
    return part_STE


@planned
def _scoring(
    shape: tuple[int, int], stride: int, experts: int, widen: bool, tile: RouterTile
) -> tuple[tuple[int, int, int], PreparedLaunch]:
    """Their launch, and the shape of the parts."""
    tokens, hidden = shape
    span = cdiv(cdiv(hidden, tile.depth), tile.parts) * tile.depth
    parts = cdiv(hidden, span)
    return (parts, tokens, experts), PreparedLaunch(
        _score_part, (cdiv(tokens, tile.rows), cdiv(experts, tile.columns), parts),
        (tokens, hidden, experts, stride, span), ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, WIDEN=widen,
        num_warps=tile.warps, num_stages=tile.stages, **FUSED,
    )  # fmt: skip


def gate_like_rows(gate_EH: Tensor, dtype: torch.dtype) -> Tensor:
    """In the rows' 16-bit `dtype` where that keeps every number: the products are the same then, and matrix
    instructions make them."""
    if gate_EH.dtype is not torch.float32 or dtype.itemsize != 2 or gate_EH.is_meta:
        return gate_EH
    kept_EH = gate_EH.to(dtype)
    return kept_EH if bool((kept_EH.float() == gate_EH).all()) else gate_EH


def choose(part_STE: Tensor, bias_E: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    shape = part_STE.shape
    expert_TK = part_STE.new_empty(shape[1], rule.top_k, dtype=torch.int32)
    weight_TK = part_STE.new_empty(shape[1], rule.top_k)
    if shape[1]:
        _choosing(shape, rule)(part_STE, bias_E, expert_TK, weight_TK)
    return expert_TK, weight_TK


@planned
def _choosing(shape: tuple[int, int, int], rule: RouterRule) -> PreparedLaunch:
    parts, tokens, experts = shape
    grouped = rule.groups > 1 and rule.selection is not Selection.PLAIN
    groups = rule.groups if grouped else 1
    return PreparedLaunch(
        _choose, (tokens,), (tokens, experts, rule.epsilon, rule.scale, rule.closed_value),
        GROUPS=power_of_two(groups), EACH=experts // groups, EACH_PADDED=power_of_two(experts // groups), PARTS=parts,
        SIGMOID=rule.scoring is Scoring.SIGMOID, SOFTMAX=rule.scoring is Scoring.SOFTMAX, GROUPED=grouped,
        TOP2=rule.selection is Selection.GROUP_TOP2_SUM, TOP_GROUPS=rule.top_groups, TOP_K=rule.top_k,
        CHOICES=power_of_two(rule.top_k), RENORMALISE=rule.renormalise, num_warps=1, **FUSED,
    )  # fmt: skip
