"""One decoder layer's attention half as a value: what `Ops.gqa_half` needs besides rows, cache and batch.

Shapes: H hidden, A query heads, D head size, E experts, P positions.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from afserve.kernels.packed import PackedLinear
from afserve.kernels.routing import RouterRule


@dataclass(slots=True)
class GqaLayer:
    """Projections are packed: `qkv` stacks heads of q, then k, then v. Norms have the rows' dtype.

    `sink_A` is a logit per head that takes weight and gives no value. Without a router `gate_EH` and `rule` are None.
    `handle` is what a fast backend keeps, `cache` what the door does; nobody else reads them.
    """

    input_norm_H: Tensor
    qkv: PackedLinear
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    cos_PD: Tensor
    sin_PD: Tensor
    out: PackedLinear
    post_norm_H: Tensor
    gate_EH: Tensor | None
    bias_E: Tensor | None
    rule: RouterRule | None
    heads: int
    groups: int
    head_dim: int
    eps: float
    scale: float
    window: int | None = None
    sink_A: Tensor | None = None
    handle: object | None = None
    cache: "BoundCache | None" = None


@dataclass(frozen=True, slots=True)
class BoundCache:
    """The keys and values that a layer was last called with, which were found to fit; a step calls with the same."""

    k_NGBD: Tensor
    v_NGBD: Tensor
    handle: object | None


class Half(NamedTuple):
    """What an attention half hands to the FFN half; the last two are None without a router."""

    normed_TH: Tensor
    expert_TK: Tensor | None
    weight_TK: Tensor | None
