"""Qwen3-Next (`Qwen3NextForCausalLM`): gated delta nets, every fourth layer gated attention; a gated shared expert."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import PREDICTOR_APART, Naming, StackedNames
from afserve.families.reading.attention import gqa, layer_types
from afserve.families.reading.ffn import gated_shared, sparse_steps, stack
from afserve.spec_parts import Around, AttentionSpec, GateSpec, LayerSpec

_FULL, _LINEAR = "full_attention", "linear_attention"


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Also of Qwen3.5, whose config.json has the same fields."""
    if not fields.flag("attn_output_gate", True):
        raise fields.refuse("attn_output_gate", "is not true")
    bias = fields.flag("attention_bias", False)
    full = replace(
        gqa(fields, theta=10000.0, partial=0.25, qk_norm="head", bias=bias), gate=GateSpec("query")
    )
    moe = gated_shared(fields, renormalise=True)
    whole = stack(fields, full, moe, sparse_steps(fields), fields.optional("intermediate_size") or 0)
    delta = _delta(fields)
    return tuple(
        replace(layer, attention=delta) if kind == _LINEAR else layer
        for layer, kind in zip(whole, _kinds(fields), strict=True)
    )


def _kinds(fields: ConfigFields) -> tuple[str, ...]:
    if fields.has("layer_types"):
        return layer_types(fields, _FULL, _LINEAR)
    every = fields.integer("full_attention_interval", default=4)
    return tuple(_LINEAR if (i + 1) % every else _FULL for i in range(fields.integer("num_hidden_layers")))


def _delta(fields: ConfigFields) -> AttentionSpec:
    return AttentionSpec(
        kind="linear",
        heads=fields.integer("linear_num_value_heads", default=32),
        kv_heads=fields.integer("linear_num_key_heads", default=16),
        head_dim=fields.integer("linear_key_head_dim", default=128),
        value_dim=fields.integer("linear_value_head_dim", default=128),
        taps=fields.integer("linear_conv_kernel_dim", default=4),
    )


def _around(fields: ConfigFields) -> Around:
    return Around(norm_less_one=True)


FAMILY = Family(_layers, Naming(shared="shared_expert", predictor=PREDICTOR_APART), _around)


def _renormalised(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Qwen3.5's router always does so."""
    return tuple(
        replace(layer, ffn=replace(layer.moe, renormalise=True)) if layer.moe else layer
        for layer in _layers(fields)
    )


# Qwen3.5-MoE without its vision part (`Qwen3_5MoeForCausalLM`): projections apart, experts with tensors of their own or
# in those of all. A text's positions are the same in all three sections of the rotary embedding: it is the plain one.
_QWEN3_5 = Naming(
    shared="shared_expert",
    linear_parts=True,
    predictor=PREDICTOR_APART,
    stacked=StackedNames("experts.gate_up_proj", "experts.down_proj", sometimes=True),
)
QWEN3_5 = Family(_renormalised, _QWEN3_5, _around)
QWEN3_5_WITH_VISION = replace(
    QWEN3_5, naming=replace(_QWEN3_5, stem="model.language_model"), sections=("text_config",)
)
