"""K-EXAONE (`ExaoneMoeForCausalLM`): DeepSeek-V3's router; layers with windows turn heads, full ones do not."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import Naming
from afserve.families.reading.attention import gqa, layer_types
from afserve.families.reading.ffn import sigmoid_groups, sparse_layers, stack
from afserve.spec_parts import AttentionSpec, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    moe = sigmoid_groups(fields)
    return stack(
        fields, _attention(fields), moe, sparse_layers(fields, 1), fields.integer("intermediate_size")
    )


def _attention(fields: ConfigFields) -> list[AttentionSpec]:
    turned, window = gqa(fields, theta=10000.0, qk_norm="head"), fields.optional("sliding_window")
    narrow, full = replace(turned, window=window), replace(turned, rope=None if window else turned.rope)
    names = ("sliding_attention", "full_attention")
    if fields.has("layer_types"):
        return [narrow if name == names[0] else full for name in layer_types(fields, *names)]
    every = fields.integer("sliding_window_pattern", default=4)
    layers = fields.integer("num_hidden_layers")
    return [narrow if window and (layer + 1) % every else full for layer in range(layers)]


FAMILY = Family(
    _layers,
    Naming(correction_bias="e_score_correction_bias"),
    renames=(("num_experts", "n_routed_experts"), ("num_shared_experts", "n_shared_experts")),
    defaults={"rms_norm_eps": 1e-5, "num_shared_experts": 1, "routed_scaling_factor": 2.5},
)
