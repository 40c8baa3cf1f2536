"""Qwen3-Next (`Qwen3NextForCausalLM`): gated delta nets, every fourth layer gated attention; a gated shared expert."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family, beside_vision
from afserve.families.pattern.naming import PREDICTOR_APART, Naming, StackedNames
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import gated_shared, sparse_steps, stack
from afserve.families.reading.layers import FULL, LINEAR, by_type
from afserve.families.reading.vision import whole_encoder
from afserve.spec_parts import Around, AttentionSpec, GateSpec, LayerSpec, MoeSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    return _with(fields, gated_shared(fields, renormalise=True))


def _renormalised(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Qwen3.5's router always does so; its config.json has the same fields otherwise."""
    return _with(fields, replace(gated_shared(fields, renormalise=True), renormalise=True))


def _with(fields: ConfigFields, moe: MoeSpec) -> tuple[LayerSpec, ...]:
    if not fields.flag("attn_output_gate", True):
        raise fields.refuse("attn_output_gate", "is not true")
    bias, every = fields.flag("attention_bias", False), fields.integer("full_attention_interval", default=4)
    full = gqa(fields, theta=10000.0, partial=0.25, qk_norm="head", bias=bias)
    each = {LINEAR: _delta(fields), FULL: replace(full, gate=GateSpec("query"))}
    return stack(fields, by_type(fields, each, every=every), moe, sparse_steps(fields))


def _delta(fields: ConfigFields) -> AttentionSpec:
    return AttentionSpec(
        kind="linear",
        heads=fields.integer("linear_num_value_heads", default=32),
        kv_heads=fields.integer("linear_num_key_heads", default=16),
        head_dim=fields.integer("linear_key_head_dim", default=128),
        value_dim=fields.integer("linear_value_head_dim", default=128),
        taps=fields.integer("linear_conv_kernel_dim", default=4),
    )


def _around(fields: ConfigFields) -> Around:
    return Around(norm_less_one=True)


FAMILY = Family(_layers, Naming(shared="shared_expert", predictor=PREDICTOR_APART), _around)
_NAMES = Naming(
    shared="shared_expert",
    linear_parts=True,
    predictor=PREDICTOR_APART,
    stacked=StackedNames("experts.gate_up_proj", "experts.down_proj", sometimes=True),
)
"""Of Qwen3.5-MoE (`Qwen3_5MoeForCausalLM`): projections apart, experts with tensors of their own or in those of all. A
text's positions are the same in all three sections of the rotary embedding: it is the plain one. Those of pictures are
not, and its encoder says how they turn."""
QWEN3_5 = Family(_renormalised, _NAMES, _around)
QWEN3_5_WITH_VISION = replace(beside_vision(QWEN3_5, "model.language_model"), encoder=whole_encoder)
