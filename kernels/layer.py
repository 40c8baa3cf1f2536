"""One decoder layer's attention half as values: its weights, what a backend made of them, and the two tied to a cache.

Shapes: H hidden, A query heads, D head size, E experts, P positions.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from afserve.kernels.packed import PackedLinear
from afserve.kernels.routing import RouterRule


@dataclass(frozen=True, slots=True)
class GqaLayer:
    """Projections are packed: `qkv` stacks heads of q, then k, then v. Norms have the rows' dtype.

    `sink_A` is a logit per head that takes weight and gives no value. Without a router `gate_EH` and `rule` are None.
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


@dataclass(frozen=True, slots=True)
class PreparedGqa:
    """What `Ops.prepare_gqa` made of a layer, once at load. Only the backend reads `handle`; None: single ops run."""

    layer: GqaLayer
    handle: object | None = None


@dataclass(frozen=True, slots=True)
class BoundGqa:
    """What `Ops.bind_gqa` made of a layer and its part of a cache: all that a step does not change.

    Only the backend reads `handle`, which may hold addresses: what they point at is held by this value too.
    """

    layer: GqaLayer
    k_NGBD: Tensor
    v_NGBD: Tensor
    handle: object | None = None


class Half(NamedTuple):
    """What an attention half hands to the FFN half; the last two are None without a router."""

    normed_TH: Tensor
    expert_TK: Tensor | None
    weight_TK: Tensor | None
