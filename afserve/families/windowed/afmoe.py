"""AFMoE, Arcee's Trinity (`AfmoeForCausalLM`): norms before and after attention and FFN, a gate for what heads saw;
full layers do not turn heads."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import dense_then_moe, sigmoid_groups, stack
from afserve.families.reading.layers import by_type, narrow_ones_turn
from afserve.spec_parts import Around, AttentionSpec, GateSpec, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    for name, known in (("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1), ("topk_group", 1)):
        fields.known_only(name, known)
    layers = stack(fields, _attention(fields), sigmoid_groups(fields), dense_then_moe(fields, 1))
    return tuple(replace(layer, ffn=replace(layer.ffn, normed=True)) for layer in layers)


def _attention(fields: ConfigFields) -> list[AttentionSpec]:
    bias = fields.flag("attention_bias", False)
    turned = gqa(fields, theta=10000.0, qk_norm="head", bias=bias)
    turned = replace(turned, gate=GateSpec("numbers"), normed=True)
    each = narrow_ones_turn(turned, fields.integer("sliding_window", default=1024))
    return by_type(fields, each, every=fields.integer("global_attn_every_n_layers", default=4))


def _around(fields: ConfigFields) -> Around:
    """muP's scale of the embedding."""
    scaled = fields.flag("mup_enabled", False)
    return Around(embedding_scale=fields.integer("hidden_size") ** 0.5 if scaled else 1.0)


FAMILY = Family(
    _layers,
    Naming(
        router_weight="router.gate.weight",
        correction_bias="expert_bias",
        output_gate="gate_proj",
        after_attention="post_attention_layernorm.weight",
        post_norm="pre_mlp_layernorm.weight",
    ),
    _around,
    renames=(
        ("num_experts", "n_routed_experts"),
        ("num_shared_experts", "n_shared_experts"),
        ("num_dense_layers", "first_k_dense_replace"),
        ("route_scale", "routed_scaling_factor"),
    ),
    defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "num_shared_experts": 2},
)
