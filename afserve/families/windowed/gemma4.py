"""Gemma 4 with experts (`Gemma4ForCausalLM`, or inside of `Gemma4ForConditionalGeneration`): norms before and behind
attention, shared and routed experts; full layers have heads of their own, whose values may be their keys."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family, beside_vision
from afserve.families.pattern.naming import Naming, StackedNames
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import routed, stack
from afserve.families.reading.layers import FULL, SLIDING, layer_types
from afserve.families.reading.rope import of_type
from afserve.spec_parts import Around, AttentionSpec, LayerSpec

_GELU = "gelu_pytorch_tanh"
_OF_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
_ONLY = {
    "enable_moe_block": True,
    "use_double_wide_mlp": False,
    "use_bidirectional_attention": "vision",
    "hidden_activation": _GELU,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    for name, known in _ONLY.items():
        fields.known_only(name, known)
    shared = fields.integer("intermediate_size")
    moe = routed(fields, "num_experts", inner="moe_intermediate_size", scoring="softmax", renormalise=True)
    moe = replace(moe, shared_inner=shared, activation=_GELU, apart=True, normed=True)
    return stack(fields, _attention(fields), moe)


def _attention(fields: ConfigFields) -> list[AttentionSpec]:
    """`layer_types`, or every sixth layer a full one; the last one always is. Sizes of a full layer's heads are
    `global_...`, or, where there is a `per_layer_config`, those of the first one in it, or else all layers'."""
    types, of_key = layer_types(fields, SLIDING, FULL, every=6), fields.flag("attention_k_eq_v", False)
    types = (*types[:-1], FULL)
    listed = fields.inner(fields.section("per_layer_config"), "per_layer_config")
    own = dict(listed.section(str(types.index(FULL))))
    if not fields.has("per_layer_config"):
        own["head_dim"] = fields.integer("global_head_dim", default=512)
        if of_key and fields.has("num_global_key_value_heads"):
            own["num_key_value_heads"] = fields.integer("num_global_key_value_heads")
    view = fields.view(own, _OF_FULL)
    narrow = replace(_of(fields, SLIDING), window=fields.integer("sliding_window", default=512))
    each = {SLIDING: narrow, FULL: replace(_of(view, FULL), value_of_key=of_key)}
    return [each[name] for name in types]


def _of(fields: ConfigFields, name: str) -> AttentionSpec:
    bias = fields.flag("attention_bias", False)
    made = gqa(of_type(fields, name), theta=1e4, qk_norm="head", bias=bias)
    return replace(made, scale=1.0, normed=True, value_norm=True)


def _around(fields: ConfigFields) -> Around:
    cap = fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else None
    return Around(scaled_by_layer=True, logit_cap=cap, embedding_scale=fields.integer("hidden_size") ** 0.5)


_NAMES = Naming(
    moe="",
    shared="mlp",
    router_weight="router.proj.weight",
    stacked=StackedNames("experts.gate_up_proj", "experts.down_proj"),
    after_attention="post_attention_layernorm.weight",
    post_norm="pre_feedforward_layernorm_2.weight",
    after_ffn="post_feedforward_layernorm.weight",
)
_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_DEFAULTS = {"rope_parameters": _ROPE, "hidden_size_per_layer_input": 256, "tie_word_embeddings": True}
TEXT = Family(
    _layers, _NAMES, _around, renames=(("top_k_experts", "num_experts_per_tok"),), defaults=_DEFAULTS
)
WITH_VISION = beside_vision(TEXT, "model.language_model")
