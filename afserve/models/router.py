"""The router of one MoE layer: its gate, its selection bias and the family's rule. Choosing is `Ops.route`. What it
chose is parted in what is sent to experts and what the attention side does itself.

Shapes: T tokens, K top-k, X width of the rows that experts eat.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from afserve.families.pattern.naming import Naming, bias_of
from afserve.kernels.routing import RouterRule, Scoring, Selection
from afserve.models.weights import WholeTensors
from afserve.spec import ModelSpec
from afserve.spec_parts import MoeSpec

NO_EXPERT = -1


@dataclass(frozen=True, slots=True)
class Router:
    gate_EH: Tensor
    bias_E: Tensor | None
    rule: RouterRule
    gate_bias_E: Tensor | None = None
    norm_H: Tensor | None = None
    expert_scale_E: Tensor | None = None


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
        jitter=moe.jitter,
    )


def load_router(
    spec: ModelSpec, layer: int, source: WholeTensors, naming: Naming, dtype: torch.dtype
) -> Router:
    """The gate keeps the checkpoint's precision, in float32; biases are always float32."""
    moe = spec.layer(layer).moe
    assert moe is not None, "a dense layer has no router"
    e = moe.choices
    gate = source.tensor(naming.router(layer), (e, spec.hidden), dtype).float()
    bias = added = None
    name = naming.router_bias(layer)
    if moe.correction_bias and (not naming.correction_sometimes or source.has_tensor(name)):
        bias = source.tensor(name, (1, e) if naming.correction_row else (e,), torch.float32).view(e)
    if moe.router_bias:
        added = source.tensor(bias_of(naming.router(layer)), (e,), torch.float32)
    if not moe.apart:
        return Router(gate, bias, rule_of(moe), added)
    norm = source.tensor(naming.in_moe(layer, naming.router_norm), (spec.hidden,), dtype)
    scale = source.tensor(naming.in_moe(layer, naming.expert_scale), (e,), torch.float32)
    return Router(gate * spec.hidden**-0.5, bias, rule_of(moe), added, norm, scale)


class Sent(NamedTuple):
    """A dispatch of a layer: rows, experts (NO_EXPERT: none) and weights. `own_TX`, float32, is what the layer adds to
    the experts' sums itself; None where there is nothing."""

    x_TX: Tensor
    expert_TK: Tensor
    weight_TK: Tensor
    own_TX: Tensor | None = None

    def whole(self, sum_TX: Tensor) -> Tensor:
        """With the experts' sums."""
        return sum_TX if self.own_TX is None else sum_TX + self.own_TX


def parted(x_TX: Tensor, expert_TK: Tensor, weight_TK: Tensor, experts: int) -> Sent:
    """Of choices whose numbers from `experts` on compute nothing: such an expert gives the row as it is, and none of
    them leaves the attention node (LongCat-Flash, arXiv 2509.01322). A row's numbers do not depend on other rows."""
    idle_TK = expert_TK >= experts
    own_TK = torch.where(idle_TK, weight_TK, 0.0)
    own_T1 = own_TK.cumsum(1)[:, -1:]  # one after the other, for any number of rows
    return Sent(x_TX, torch.where(idle_TK, NO_EXPERT, expert_TK), weight_TK, x_TX.float() * own_T1)
