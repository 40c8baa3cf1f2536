"""Llama 4's text model (`Llama4ForCausalLM`, or inside of `Llama4ForConditionalGeneration`).

Layers attend in chunks with a rotary embedding, or to all of the context without one; an expert's weight is on its
input; layers with experts may take turns with dense ones.
"""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.config_ranges import LAYER_COUNT, MOST_LAYERS
from afserve.families.pattern.family import Family, beside_vision
from afserve.families.pattern.naming import Naming, StackedNames
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import routed, stack
from afserve.families.reading.layers import FULL, layer_marks, layer_types
from afserve.families.reading.vision import tile_encoder
from afserve.spec_parts import AttentionSpec, LayerSpec

_CHUNKED = "chunked_attention"


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    inner = fields.integer("intermediate_size")
    moe = routed(fields, "num_local_experts", shared_inner=inner, scoring="sigmoid", weigh_input=True)
    dense = fields.integer("intermediate_size_mlp", default=inner)
    return stack(fields, _attention(fields), moe, _moe_layers(fields), dense)


def _attention(fields: ConfigFields) -> list[AttentionSpec]:
    """`no_rope_layers` has a 1 for every layer *with* a rotary embedding; each fourth has none where it is absent."""
    plain = gqa(fields, theta=500000.0, bias=fields.flag("attention_bias", False), interleaved=True)
    turned = replace(plain, qk_norm="unit" if fields.flag("use_qk_norm", True) else "")
    tuned = bool(fields.config.get("attn_temperature_tuning", True))
    floor, scale = fields.integer("floor_scale", default=8192), fields.number("attn_scale", default=0.1)
    still = replace(plain, rope=None, temperature=(floor, scale, 1) if tuned else None)
    layers, every = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval", default=4)
    turns = layer_marks(fields, "no_rope_layers") or [(layer + 1) % every != 0 for layer in range(layers)]
    chunk = fields.integer("attention_chunk_size", default=8192)
    otherwise = [_CHUNKED if turn else FULL for turn in turns]
    types = layer_types(fields, _CHUNKED, FULL, otherwise=otherwise)
    return [
        replace(turned if turn else still, chunk=chunk if name == _CHUNKED else None)
        for turn, name in zip(turns, types, strict=True)
    ]


def _moe_layers(fields: ConfigFields) -> frozenset[int]:
    layers = fields.integer("num_hidden_layers")
    step = fields.integer("interleave_moe_layer_step", default=1)
    if fields.has("moe_layers"):
        listed = fields.integers("moe_layers", LAYER_COUNT, MOST_LAYERS)
        return frozenset(layer for layer in listed if layer < layers)
    return frozenset(range(step - 1, layers, step))


_NAMES = Naming(
    moe="feed_forward",
    dense_ffn="feed_forward",
    shared="shared_expert",
    router_weight="router.weight",
    stacked=StackedNames("experts.gate_up_proj", "experts.down_proj", transposed=True),
)
FAMILY = Family(_layers, _NAMES, defaults={"rms_norm_eps": 1e-5})
_TEXT = beside_vision(FAMILY, "language_model.model", "language_model.lm_head.weight")
WITH_VISION = replace(_TEXT, encoder=tile_encoder)
