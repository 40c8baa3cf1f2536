"""Laguna (`LagunaForCausalLM`): a gate for what heads saw; layers differ in heads, windows and rotary embedding."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.config_ranges import HEADS, MOST_LAYERS
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import beside_shared, sparse_layers, stack
from afserve.families.reading.layers import FULL, SLIDING, by_type
from afserve.families.reading.rope import of_type
from afserve.spec_parts import AttentionSpec, GateSpec, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    fields.known_only("moe_apply_router_weight_on_input", False)
    fields.known_only("moe_router_logit_softcapping", 0.0, 0)
    scale = fields.number("routed_scaling_factor", default=1.0)
    moe = beside_shared(fields, "sigmoid", renormalise=True, scale=scale, correction_bias=True)
    return stack(fields, _attention(fields), moe, sparse_layers(fields, 1))


def _attention(fields: ConfigFields) -> list[AttentionSpec]:
    fields.known_only("gating", True, "per-head", False, "per-element")
    by_head = fields.config.get("gating", True) in (True, "per-head")
    gate = GateSpec("heads" if by_head else "numbers", softplus=True)
    full, narrow = _of(fields, FULL, 5e5, 0.5), _of(fields, SLIDING, 1e4, 1.0)
    narrow = replace(narrow, window=fields.integer("sliding_window", default=512))
    layers = by_type(fields, {FULL: full, SLIDING: narrow})
    heads = fields.integers("num_attention_heads_per_layer", HEADS, MOST_LAYERS) or [full.heads] * len(layers)
    if len(heads) != len(layers) or any(count % full.kv_heads for count in heads):
        raise fields.refuse(
            "num_attention_heads_per_layer",
            f"is not a multiple of num_key_value_heads {full.kv_heads} for each of num_hidden_layers, {len(layers)}",
        )
    return [replace(one, heads=count, gate=gate) for one, count in zip(layers, heads, strict=True)]


def _of(fields: ConfigFields, name: str, theta: float, partial: float) -> AttentionSpec:
    """`theta` and the `partial` of a head that turns are for a config.json without `rope_parameters`."""
    partial = 1.0 if fields.section("rope_parameters") else partial
    bias = fields.flag("attention_bias", False)
    return gqa(of_type(fields, name), theta=theta, partial=partial, qk_norm="head", bias=bias)


FAMILY = Family(
    _layers,
    Naming(shared="shared_expert", correction_bias="experts.e_score_correction_bias"),
    renames=(("moe_routed_scaling_factor", "routed_scaling_factor"),),
    defaults={"head_dim": 128, "shared_expert_intermediate_size": 512},
)
