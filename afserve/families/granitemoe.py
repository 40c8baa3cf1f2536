"""Granite MoE (`GraniteMoeForCausalLM`): Mixtral with multipliers of embedding, attention, residuals and logits; and
Granite with windows (`GraniteMoeSWAForCausalLM`), which has sinks and a rotary embedding for each layer, or none.

The multiplier of what is added to the residual stream is in the output projection and in the weights of experts.
"""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.config_ranges import LAYER_THETA, MOST_LAYERS
from afserve.families.family import Family
from afserve.families.naming import Naming, StackedNames
from afserve.families.reading.attention import gqa, layer_types
from afserve.families.reading.ffn import routed, stack
from afserve.spec_parts import Around, AttentionSpec, LayerSpec, MoeSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    return stack(fields, _attention(fields), _experts(fields))


def _attention(fields: ConfigFields) -> AttentionSpec:
    return replace(
        gqa(fields, theta=10000.0, bias=fields.flag("attention_bias", False)),
        scale=fields.number("attention_multiplier", default=1.0),
        out_scale=fields.number("residual_multiplier", default=1.0),
    )


def _experts(fields: ConfigFields) -> MoeSpec:
    added = fields.number("residual_multiplier", default=1.0)
    return routed(fields, "num_local_experts", scoring="topk_softmax", scale=added)


def _swa_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    fields.known_only("shared_intermediate_size", 0)
    full = replace(_attention(fields), sinks=True)
    narrow = replace(full, window=fields.integer("sliding_window", default=128))
    each = {"full_attention": full, "sliding_attention": narrow}
    layers, rope = fields.integer("num_hidden_layers"), full.rope
    types = ("full_attention", *("sliding_attention",) * 3) * -(-layers // 4)
    if fields.has("layer_types"):
        types = layer_types(fields, *each)
    thetas = fields.reals("layer_rope_theta", LAYER_THETA, MOST_LAYERS)
    if thetas and len(thetas) != layers:
        raise fields.refuse(
            "layer_rope_theta", f"is not a number for each layer of num_hidden_layers {layers}"
        )
    turned = [replace(rope, theta=theta) if rope and theta else None for theta in thetas] or [rope] * layers
    attention = [replace(each[name], rope=turn) for name, turn in zip(types, turned, strict=False)]
    return stack(fields, attention, _experts(fields))


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
SWA = Family(
    _swa_layers,
    Naming(
        moe="block_sparse_moe",
        router_weight="router.weight",
        stacked=StackedNames(gate_up="experts.gate_up_proj", down="experts.down_proj"),
    ),
    _around,
)
