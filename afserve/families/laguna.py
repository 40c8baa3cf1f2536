"""Laguna (`LagunaForCausalLM`): a gate for what heads saw; layers differ in heads, windows and rotary embedding."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.config_ranges import HEADS, MOST_LAYERS
from afserve.families.family import Family
from afserve.families.naming import Naming
from afserve.families.reading.attention import gqa, layer_types, of_type
from afserve.families.reading.ffn import routed, sparse_layers, stack
from afserve.spec_parts import AttentionSpec, GateSpec, LayerSpec

_FULL, _NARROW = "full_attention", "sliding_attention"


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    fields.known_only("moe_apply_router_weight_on_input", False)
    fields.known_only("moe_router_logit_softcapping", 0.0, 0)
    moe = routed(
        fields,
        "num_experts",
        inner="moe_intermediate_size",
        shared_inner=fields.integer("shared_expert_intermediate_size"),
        scoring="sigmoid",
        renormalise=True,
        scale=fields.number("routed_scaling_factor", default=1.0),
        correction_bias=True,
    )
    return stack(
        fields, _attention(fields), moe, sparse_layers(fields, 1), fields.integer("intermediate_size")
    )


def _attention(fields: ConfigFields) -> list[AttentionSpec]:
    fields.known_only("gating", True, "per-head", False, "per-element")
    gate = GateSpec(
        "heads" if fields.config.get("gating", True) in (True, "per-head") else "numbers", softplus=True
    )
    window = fields.integer("sliding_window", default=512)
    each = {
        _FULL: _of(fields, _FULL, 5e5, 0.5),
        _NARROW: replace(_of(fields, _NARROW, 1e4, 1.0), window=window),
    }
    types, layers = layer_types(fields, *each), fields.integer("num_hidden_layers")
    heads = fields.integers("num_attention_heads_per_layer", HEADS, MOST_LAYERS)
    heads = heads or (each[_FULL].heads,) * layers
    if len(heads) != layers or any(count % each[_FULL].kv_heads for count in heads):
        raise fields.refuse(
            "num_attention_heads_per_layer",
            f"is not a multiple of num_key_value_heads {each[_FULL].kv_heads} for each of {layers} layers",
        )
    return [replace(each[name], heads=count, gate=gate) for name, count in zip(types, heads, strict=True)]


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
