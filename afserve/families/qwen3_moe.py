"""Qwen3-MoE (`Qwen3MoeForCausalLM`): GQA with norms on queries and keys, softmax router; and Mellum 2
(`MellumForCausalLM`), which has a window and a rotary embedding for each type of layer; and Qwen3-VL-MoE without its
vision part (`Qwen3VLMoeForConditionalGeneration`). A text's positions are the same in all three sections of its rotary
embedding: it is the plain one."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import Naming, StackedNames
from afserve.families.reading.attention import gqa, layer_types, of_type
from afserve.families.reading.ffn import routed, sparse_layers, sparse_steps, stack
from afserve.spec_parts import AttentionSpec, LayerSpec

_THETAS = {"full_attention": 500000.0, "sliding_attention": 10000.0}


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    window = fields.optional("sliding_window") if fields.flag("use_sliding_window", False) else None
    bias = fields.flag("attention_bias", False)
    attention = gqa(fields, theta=10000.0, qk_norm="head", bias=bias, window=window)
    moe = routed(
        fields,
        *("num_experts", "num_local_experts"),
        inner="moe_intermediate_size",
        scoring="softmax",
        renormalise=fields.flag("norm_topk_prob", False),
    )
    return stack(fields, attention, moe, sparse_steps(fields), fields.optional("intermediate_size") or 0)


def _mellum_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    each = {name: _attention(fields, name) for name in _THETAS}
    attention = [each[name] for name in layer_types(fields, *_THETAS)]
    moe = routed(
        fields,
        *("num_experts", "num_local_experts"),
        inner="moe_intermediate_size",
        scoring="softmax",
        renormalise=fields.flag("norm_topk_prob", True),
    )
    return stack(fields, attention, moe, sparse_layers(fields, 0), fields.optional("intermediate_size") or 0)


def _attention(fields: ConfigFields, name: str) -> AttentionSpec:
    bias = fields.flag("attention_bias", False)
    made = gqa(of_type(fields, name), theta=_THETAS[name], qk_norm="head", bias=bias)
    if name == "full_attention":
        return made
    return replace(made, window=fields.integer("sliding_window", default=1024))


def _beside_vision(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Its router always renormalises."""
    layers = _layers(fields)
    return tuple(replace(one, ffn=replace(one.moe, renormalise=True)) if one.moe else one for one in layers)


FAMILY = Family(_layers, Naming())
WITH_VISION = Family(
    _beside_vision,
    Naming(
        stem="model.language_model",
        stacked=StackedNames("experts.gate_up_proj", "experts.down_proj", transposed=True),
    ),
    sections=("text_config",),
)
MELLUM = Family(_mellum_layers, Naming())
