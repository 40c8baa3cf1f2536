"""The router of one MoE layer: its gate, its selection bias and the family's rule. Choosing is `Ops.route`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.families.naming import Naming
from afserve.kernels.routing import RouterRule, Scoring, Selection
from afserve.models.weights import TensorSource
from afserve.spec import ModelSpec
from afserve.spec_parts import MoeSpec


@dataclass(frozen=True, slots=True)
class Router:
    gate_EH: Tensor
    bias_E: Tensor | None
    rule: RouterRule


def rule_of(moe: MoeSpec) -> RouterRule:
    return RouterRule(
        top_k=moe.top_k,
        scoring=Scoring(moe.scoring),
        selection=Selection(moe.selection),
        groups=moe.groups,
        top_groups=moe.top_groups,
        renormalise=moe.renormalise,
        epsilon=moe.epsilon,
        scale=moe.scale,
        closed_value=0.0 if moe.closed_to_zero else float("-inf"),
    )


def load_router(
    spec: ModelSpec, layer: int, source: TensorSource, naming: Naming, dtype: torch.dtype
) -> Router:
    """The gate keeps the checkpoint's precision, in float32; the selection bias is always float32."""
    moe = spec.layer(layer).moe
    assert moe is not None, "a dense layer has no router"
    gate = source.tensor(naming.router(layer), (moe.experts, spec.hidden), dtype).float()
    bias = (
        source.tensor(naming.router_bias(layer), (moe.experts,), torch.float32)
        if moe.correction_bias
        else None
    )
    return Router(gate, bias, rule_of(moe))
