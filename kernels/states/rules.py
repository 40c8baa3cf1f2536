"""The rules by which a state moves: one token, or a segment of tokens at once. They know no cache and no batch.

Sources, shapes and what the rules are: `kernels/delta.py`. All of it is computed in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LONGEST = 64  # tokens of a segment: products of so many rows, and a triangle of so many to solve
Rule = Literal["head", "channel", "sum"]
RULES: tuple[Rule, ...] = ("head", "channel", "sum")  # as native/delta.h numbers them


def step(
    q_SVK: Tensor,
    k_SVK: Tensor,
    v_SVD: Tensor,
    decay_SVE: Tensor,
    beta_SV: Tensor,
    state_SVKD: Tensor,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """One token: what it reads, (S, V, D), and the new state. The state forgets, what it says for the key is replaced
    by a share of the value, or the share is added, then the query reads it."""
    state = state_SVKD * decay_SVE.exp()[..., None]
    if rule != "sum":
        v_SVD = v_SVD - (state * k_SVK[..., None]).sum(-2)
    state = state + k_SVK[..., None] * (v_SVD * beta_SV[..., None])[..., None, :]
    return (state * q_SVK[..., None]).sum(-2), state


def segment(
    q_VLK: Tensor,
    k_VLK: Tensor,
    v_VLD: Tensor,
    decay_VLE: Tensor,
    beta_VL: Tensor,
    state_VKD: Tensor,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """L times `step`, as products of matrices: what all tokens read, (V, L, D), and the state behind the last.

    What every token adds to the state depends on what those before it added. That is a triangle of equations, solved
    once (the UT transform); sums then take what is in the state and what is added within the segment.
    """
    total = decay_VLE.cumsum(1)  # logarithm of what is left of the old state at each token
    added = v_VLD * beta_VL[..., None]
    if rule != "sum":
        weighted = k_VLK * beta_VL[..., None]
        added = torch.linalg.solve_triangular(
            _within(weighted, k_VLK, total),
            added - (weighted * total.exp()) @ state_VKD,
            upper=False,
            unitriangular=True,
        )
    out = (q_VLK * total.exp()) @ state_VKD + _within(q_VLK, k_VLK, total) @ added
    left = (total[:, -1:] - total).exp()
    return out, state_VKD * total[:, -1].exp()[..., None] + (k_VLK * left).transpose(1, 2) @ added


def segments(
    q_VLK: Tensor,
    k_VLK: Tensor,
    v_VLD: Tensor,
    decay_VLE: Tensor,
    beta_VL: Tensor,
    state_VKD: Tensor,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """`segment` of any length."""
    outs = []
    for start in range(0, q_VLK.shape[1], LONGEST):
        q, k, v, decay, beta = (
            x[:, start : start + LONGEST] for x in (q_VLK, k_VLK, v_VLD, decay_VLE, beta_VL)
        )
        out, state_VKD = segment(q, k, v, decay, beta, state_VKD, rule)
        outs.append(out)
    return torch.cat(outs, 1), state_VKD


def _within(a_VLK: Tensor, k_VLK: Tensor, total_VLE: Tensor) -> Tensor:
    """(V, L, L): products of rows of a with keys up to their own, each weakened by what was forgotten in between."""
    if total_VLE.shape[-1] == 1:
        between = (total_VLE - total_VLE.transpose(1, 2)).tril().exp().tril()
        return (a_VLK @ k_VLK.transpose(1, 2)) * between
    kept = (total_VLE[:, :, None] - total_VLE[:, None]).clamp_max(0).exp()
    return torch.einsum("vik,vjk,vijk->vij", a_VLK, k_VLK, kept).tril()


Moved = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Rule], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class StateMoves:
    """Who moves states: a `step` of each sequence, a `segment` of up to `longest` tokens of one; answers as theirs."""

    step: Moved = step
    segment: Moved = segment
    longest: int = LONGEST


OWN = StateMoves()
