"""Llama 4's text model (`Llama4ForCausalLM`, or inside of `Llama4ForConditionalGeneration`).

Layers attend in chunks with a rotary embedding, or to all of the context without one; an expert's weight is on its
input; layers with experts may take turns with dense ones.
"""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.config_ranges import LAYER_COUNT, MOST_LAYERS
from afserve.families.family import Family
from afserve.families.naming import Naming, StackedNames
from afserve.families.reading.attention import gqa, layer_marks, layer_types
from afserve.families.reading.ffn import check_top_k, routed
from afserve.spec_parts import AttentionSpec, DenseSpec, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    inner = fields.integer("intermediate_size")
    moe = routed(fields, "num_local_experts", shared_inner=inner, scoring="sigmoid", weigh_input=True)
    check_top_k(fields, moe)
    dense = DenseSpec(fields.integer("intermediate_size_mlp", default=inner), moe.activation)
    with_experts = _moe_layers(fields)
    return tuple(
        LayerSpec(attention, moe if layer in with_experts else dense)
        for layer, attention in enumerate(_attention(fields))
    )


def _attention(fields: ConfigFields) -> list[AttentionSpec]:
    plain = gqa(fields, theta=500000.0, bias=fields.flag("attention_bias", False), interleaved=True)
    turned = replace(plain, qk_norm="unit" if fields.flag("use_qk_norm", True) else "")
    tuned = bool(fields.config.get("attn_temperature_tuning", True))
    floor, scale = fields.integer("floor_scale", default=8192), fields.number("attn_scale", default=0.1)
    still = replace(plain, rope=None, temperature=(floor, scale, 1) if tuned else None)
    turns = _with_rope(fields)
    names = ("chunked_attention", "full_attention")
    types = layer_types(fields, *names) if fields.has("layer_types") else [names[not turn] for turn in turns]
    chunk = fields.integer("attention_chunk_size", default=8192)
    return [
        replace(turned if turn else still, chunk=chunk if name == names[0] else None)
        for turn, name in zip(turns, types, strict=True)
    ]


def _with_rope(fields: ConfigFields) -> list[bool]:
    """`no_rope_layers` has a 1 for every layer *with* a rotary embedding; each fourth has none where it is absent."""
    layers = fields.integer("num_hidden_layers")
    listed = layer_marks(fields, "no_rope_layers")
    every = fields.integer("no_rope_layer_interval", default=4)
    return [bool(listed[layer]) if listed else (layer + 1) % every != 0 for layer in range(layers)]


def _moe_layers(fields: ConfigFields) -> frozenset[int]:
    layers = fields.integer("num_hidden_layers")
    if fields.has("moe_layers"):
        found = frozenset(fields.integers("moe_layers", LAYER_COUNT, MOST_LAYERS))
    else:
        step = fields.integer("interleave_moe_layer_step", default=1)
        found = frozenset(range(step - 1, layers, step))
    if min(found, default=layers) >= layers:
        raise fields.error(
            f"moe_layers or interleave_moe_layer_step leave none of num_hidden_layers {layers} with experts",
            "moe_layers",
        )
    return found


TEXT = Naming(
    moe="feed_forward",
    dense_ffn="feed_forward",
    shared="shared_expert",
    router_weight="router.weight",
    stacked=StackedNames("experts.gate_up_proj", "experts.down_proj", transposed=True),
)
FAMILY = Family(_layers, TEXT, defaults={"rms_norm_eps": 1e-5})
WITH_VISION = replace(
    FAMILY,
    naming=replace(TEXT, stem="language_model.model", head="language_model.lm_head.weight"),
    sections=("text_config",),
)
