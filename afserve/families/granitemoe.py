"""Granite MoE (`GraniteMoeForCausalLM`): Mixtral with multipliers of embedding, attention, residuals and logits.

The multiplier of what is added to the residual stream is in the output projection and in the weights of experts.
"""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import Naming, StackedNames
from afserve.families.read_attention import gqa
from afserve.families.read_ffn import activation, stack
from afserve.spec_parts import Around, LayerSpec, MoeSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    added = fields.number("residual_multiplier", default=1.0)
    attention = replace(
        gqa(fields, theta=10000.0, bias=fields.flag("attention_bias", False)),
        scale=fields.number("attention_multiplier", default=1.0),
        out_scale=added,
    )
    moe = MoeSpec(
        experts=fields.integer("num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        inner=fields.integer("intermediate_size"),
        shared_inner=0,
        scoring="topk_softmax",
        scale=added,
        activation=activation(fields),
    )
    return stack(fields, attention, moe, range(fields.integer("num_hidden_layers")), 0)


def _around(fields: ConfigFields) -> Around:
    return Around(
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        logit_scale=1.0 / fields.number("logits_scaling", default=1.0),
    )


FAMILY = Family(
    _layers,
    Naming(
        moe="block_sparse_moe",
        router_weight="router.layer.weight",
        stacked=StackedNames(gate_up="input_linear.weight", down="output_linear.weight"),
    ),
    _around,
)
