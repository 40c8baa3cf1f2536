"""Granite MoE (`GraniteMoeForCausalLM`): Mixtral with multipliers of embedding, attention, residuals and logits.

The multiplier of what is added to the residual stream is in the output projection and in the weights of experts.
"""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming, StackedNames
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import routed, stack
from afserve.spec_parts import Around, AttentionSpec, LayerSpec, MoeSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    return stack(fields, attention(fields), experts(fields))


def attention(fields: ConfigFields) -> AttentionSpec:
    return replace(
        gqa(fields, theta=10000.0, bias=fields.flag("attention_bias", False)),
        scale=fields.number("attention_multiplier", default=1.0),
        out_scale=fields.number("residual_multiplier", default=1.0),
    )


def experts(fields: ConfigFields) -> MoeSpec:
    added = fields.number("residual_multiplier", default=1.0)
    return routed(fields, "num_local_experts", scoring="topk_softmax", scale=added)


def around(fields: ConfigFields) -> Around:
    return Around(
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        logit_scale=1.0 / fields.number("logits_scaling", default=1.0),
    )


NAMES = Naming(
    moe="block_sparse_moe",
    router_weight="router.layer.weight",
    stacked=StackedNames(gate_up="input_linear.weight", down="output_linear.weight"),
)
FAMILY = Family(_layers, NAMES, around)
