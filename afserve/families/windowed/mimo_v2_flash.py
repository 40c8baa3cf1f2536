"""MiMo-V2-Flash (`MiMoV2FlashForCausalLM`): values narrower than keys, and scaled, which the output projection does;
layers with windows have sinks, more key heads and a rotary embedding of their own."""

from collections.abc import Collection
from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming, PredictorNames
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import sigmoid_groups, sparse_layers, stack
from afserve.families.reading.layers import FULL, SLIDING, by_type, layer_marks
from afserve.families.reading.rope import of_type
from afserve.spec_parts import AttentionSpec, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    for name in ("head_dim", "v_head_dim", "num_attention_heads"):
        fields.known_only(f"swa_{name}", fields.config.get(name))
    fields.known_only("add_swa_attention_sink_bias", True)
    fields.known_only("add_full_attention_sink_bias", False)
    marks, layers = layer_marks(fields, "hybrid_layer_pattern"), range(fields.integer("num_hidden_layers"))
    narrow = marks or [layer > 0 and (layer + 1) % 6 > 0 for layer in layers]
    each = {FULL: _attention(fields, FULL, 5e6), SLIDING: _narrow(fields)}
    attention = by_type(fields, each, [SLIDING if one else FULL for one in narrow])
    return stack(fields, attention, sigmoid_groups(fields), _moe_layers(fields))


def _attention(fields: ConfigFields, name: str, theta: float) -> AttentionSpec:
    bias = fields.flag("attention_bias", False)
    made = gqa(of_type(fields, name), theta=theta, partial=0.334, bias=bias, out_bias=False)
    scale = fields.number("attention_value_scale", default=1.0)
    return replace(made, value_dim=fields.integer("v_head_dim"), out_scale=scale)


def _narrow(fields: ConfigFields) -> AttentionSpec:
    """`sliding_window_size` does not count the token itself, `sliding_window` does."""
    made, before = _attention(fields, SLIDING, 1e4), fields.optional("sliding_window_size")
    window = fields.integer("sliding_window", default=129) if before is None else before + 1
    heads = fields.integer("swa_num_key_value_heads", default=2 * made.kv_heads)
    if made.heads % heads:
        raise fields.error(
            f"swa_num_key_value_heads, or twice num_key_value_heads: {heads} does not divide the {made.heads} of "
            "num_attention_heads",
            "swa_num_key_value_heads",
        )
    rope = made.rope
    if rope and fields.has("swa_rope_theta"):
        rope = replace(rope, theta=fields.number("swa_rope_theta"))
    return replace(made, kv_heads=heads, window=window, sinks=True, rope=rope)


def _moe_layers(fields: ConfigFields) -> Collection[int]:
    if not isinstance(fields.config.get("moe_layer_freq"), list):
        return sparse_layers(fields, 1)
    return frozenset(layer for layer, mark in enumerate(layer_marks(fields, "moe_layer_freq")) if mark)


_PREDICTOR = PredictorNames(
    "layers.0.enorm.weight",
    "layers.0.hnorm.weight",
    "layers.0.eh_proj.weight",
    "layers.0.final_layernorm.weight",
    stem="model.mtp",
    field="",
    narrow=True,
    post_norm="pre_mlp_layernorm.weight",
)
"""The first of its layers of multi-token prediction: each is one for a further token, this one drafts all of them. Its
source is vLLM's mimo_v2_mtp.py, which runs the first alone, too."""

FAMILY = Family(
    _layers,
    Naming(sinks="attention_sink_bias", predictor=_PREDICTOR),
    defaults={"rms_norm_eps": 1e-5, "v_head_dim": 128},
)
