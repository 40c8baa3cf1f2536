"""ERNIE 4.5 (`Ernie4_5_MoeForCausalLM`): interleaved rotary embedding, softmax router with a selection bias."""

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import routed, stack
from afserve.spec_parts import Around, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    bias, inner = fields.flag("use_bias", False), fields.integer("moe_intermediate_size")
    attention = gqa(fields, theta=500000.0, bias=bias, interleaved=True)
    moe = routed(
        fields,
        "moe_num_experts",
        top_k="moe_k",
        inner="moe_intermediate_size",
        shared_inner=inner * fields.integer("moe_num_shared_experts", default=2),
        shared_bias=bias,
        scoring="softmax",
        renormalise=True,
        correction_bias=True,
    )
    least = fields.number("moe_norm_min", default=1e-12)
    if least > moe.top_k / moe.experts:  # what k scores of a softmax sum to at least
        raise fields.refuse(
            "moe_norm_min", f"is more than moe_k / moe_num_experts, {moe.top_k / moe.experts:g}"
        )
    return stack(fields, attention, moe, _moe_layers(fields))


def _moe_layers(fields: ConfigFields) -> range:
    """Every `moe_layer_interval`-th layer from the first MoE layer to the last, which -1 says is the model's."""
    layers, step = fields.integer("num_hidden_layers"), fields.integer("moe_layer_interval", default=1)
    start = fields.integer("moe_layer_start_index", default=1)
    end = fields.integer("moe_layer_end_index", default=-1)
    first = start + (-(start + 1)) % step
    return range(first, layers if end == -1 else min(end + 1, layers), step)


def _around(fields: ConfigFields) -> Around:
    return Around(head_bias=fields.flag("use_bias", False))


FAMILY = Family(
    _layers,
    Naming(correction_bias="moe_statics.e_score_correction_bias", correction_row=True),
    _around,
    defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
)
