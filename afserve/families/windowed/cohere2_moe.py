"""Cohere's Command A+ (`Cohere2MoeForCausalLM`): FFNs beside attention, both over one norm; layers with windows turn
heads, full ones do not."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import routed, sparse_layers, stack
from afserve.families.reading.layers import FULL, SLIDING, by_type, narrow_ones_turn
from afserve.spec_parts import Around, AttentionSpec, LayerSpec, MoeSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    turned = gqa(fields, theta=10000.0, interleaved=True, bias=fields.flag("attention_bias", False))
    inner = fields.integer("prefix_dense_intermediate_size", "intermediate_size")
    plain = stack(fields, _attention(fields, turned), _moe(fields), sparse_layers(fields, 0), inner)
    if fields.integer("prefix_dense_sliding_window_pattern", default=1) > 1:
        return plain
    return tuple(
        one if one.moe else replace(one, attention=replace(one.attention, rope=turned.rope)) for one in plain
    )


def _moe(fields: ConfigFields) -> MoeSpec:
    """The softmax is over the chosen experts. An `average` of routed and shared experts is half of their sum."""
    fields.known_only("expert_selection_fn", "softmax", "sigmoid")
    fields.known_only("shared_expert_combination_strategy", "average", "sum")
    shared = fields.integer("intermediate_size") * fields.integer("n_shared_experts", default=0)
    halved = shared and fields.config.get("shared_expert_combination_strategy", "average") == "average"
    sigmoid = fields.config.get("expert_selection_fn") == "sigmoid"
    return routed(
        fields,
        "num_experts",
        shared_inner=shared,
        scoring="sigmoid" if sigmoid else "topk_softmax",
        renormalise=sigmoid and fields.flag("norm_topk_prob", True),
        scale=0.5 if halved else 1.0,
        shared_scale=0.5 if halved else 1.0,
    )


def _attention(fields: ConfigFields, turned: AttentionSpec) -> list[AttentionSpec]:
    """Every so many layers a full one, counted anew behind the first, dense layers."""
    each = narrow_ones_turn(turned, fields.integer("sliding_window", default=4096))
    dense, layers = fields.integer("first_k_dense_replace", default=0), fields.integer("num_hidden_layers")
    first = fields.integer("prefix_dense_sliding_window_pattern", default=1)
    every = fields.integer("sliding_window_pattern", default=4)
    places = [(i + 1) % first if i < dense else (i - dense + 1) % every for i in range(layers)]
    return by_type(fields, each, [SLIDING if place else FULL for place in places])


def _around(fields: ConfigFields) -> Around:
    """Norms are LayerNorm where there is no `rms_norm_eps`, so that `layer_norm_eps` stands in its place."""
    centred, scale = "rms_norm_eps" in fields.called, fields.number("logit_scale", default=0.0625)
    return Around(centred=centred, parallel=True, logit_scale=scale)


FAMILY = Family(
    _layers,
    Naming(post_norm="input_layernorm.weight"),
    _around,
    renames=(("layer_norm_eps", "rms_norm_eps"), ("num_shared_experts", "n_shared_experts")),
    defaults={"layer_norm_eps": 1e-5, "head_dim": 128, "tie_word_embeddings": True},
)
