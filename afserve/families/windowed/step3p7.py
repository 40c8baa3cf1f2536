"""Step 3.7 (`Step3p7ForConditionalGeneration`) without its vision part: a gate for each head, windows with heads and a
rotary embedding of their own, experts of some layers within limits. Lists of its config.json go on with layers of
multi-token prediction."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming, StackedNames
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import enumerated_layers, routed, sparse_layers, stack, within
from afserve.families.reading.layers import FULL, SLIDING, by_type, layer_types
from afserve.families.reading.rope import of_type
from afserve.spec_parts import Around, AttentionSpec, GateSpec, LayerSpec

_LIMITS = ("swiglu_limits", "swiglu_limits_shared")
_LISTED = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factors"}


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    layers, cut = fields.integer("num_hidden_layers"), ("layer_types", "mlp_layer_types", *_LIMITS)
    lists = {name: fields.config.get(name) for name in cut}
    fields = fields.view({name: one[:layers] for name, one in lists.items() if isinstance(one, list)})
    moe = replace(
        routed(fields, "n_routed_experts", inner="moe_intermediate_size", scoring="sigmoid"),
        shared_inner=fields.integer("share_expert_dim"),
        scale=fields.number("routed_scaling_factor", default=1.0),
        renormalise=True,
        correction_bias=True,
    )
    listed = not fields.has("mlp_layer_types") and fields.has("moe_layers_enum")
    moe_ids = {*enumerated_layers(fields)} & {*range(layers)} if listed else sparse_layers(fields, 3)
    which = "moe_layers_enum" if listed else "mlp_layer_types or first_k_dense_replace"
    return within(fields, stack(fields, _attention(fields), moe, moe_ids), *_LIMITS, which=which)


def _attention(fields: ConfigFields) -> list[AttentionSpec]:
    types = layer_types(fields, FULL, SLIDING)
    full, narrow = (_of(fields, name, types.index(name) if name in types else 0) for name in (FULL, SLIDING))
    other = fields.inner(fields.section("attention_other_setting"), "attention_other_setting")
    own = other.integer("num_attention_heads", default=full.heads)
    heads = fields.integer("num_sliding_attention_heads", default=own)
    if heads % full.kv_heads:
        raise fields.refuse(
            "num_sliding_attention_heads", f"is no multiple of num_key_value_heads, {full.kv_heads}"
        )
    narrow = replace(narrow, heads=heads, window=fields.optional("sliding_window"))
    return by_type(fields, {FULL: full, SLIDING: narrow})


def _of(fields: ConfigFields, name: str, layer: int) -> AttentionSpec:
    """`rope_parameters` by type, or numbers for each layer, and `rope_scaling` for full ones."""
    own: dict[str, object] = {} if name == FULL else {"rope_scaling": None}
    for new, listed in _LISTED.items():
        found = fields.config.get(listed)
        if isinstance(found, list):
            own[new] = found[layer] if layer < len(found) else None
    bias = fields.flag("attention_bias", False)
    made = gqa(of_type(fields.view(own), name), theta=1e4, qk_norm="head", bias=bias)
    return replace(made, gate=GateSpec("heads"))


def _around(fields: ConfigFields) -> Around:
    return Around(norm_less_one=True)


_STACKED = StackedNames("moe.gate_proj.weight", "moe.down_proj.weight", up="moe.up_proj.weight")
FAMILY = Family(
    _layers,
    Naming(
        "",
        router_weight="moe.gate.weight",
        correction_bias="moe.router_bias",
        stacked=_STACKED,
        shared="share_expert",
    ),
    _around,
    sections=("text_config",),
    renames=(
        ("moe_num_experts", "n_routed_experts"),
        ("moe_top_k", "num_experts_per_tok"),
        ("num_attention_groups", "num_key_value_heads"),
        ("share_expert_dims", "share_expert_dim"),
        ("moe_router_scaling_factor", "routed_scaling_factor"),
    ),
    defaults={"rms_norm_eps": 1e-5, "head_dim": 128},
)
