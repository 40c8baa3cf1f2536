"""OLMoE (`OlmoeForCausalLM`): attention with norms over the width of all heads, softmax router."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import clip_qkv, gqa
from afserve.families.reading.ffn import routed, stack
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    bias = fields.flag("attention_bias", False)
    attention = replace(gqa(fields, theta=10000.0, qk_norm="width", bias=bias), clip=clip_qkv(fields))
    renormalise = fields.flag("norm_topk_prob", False)
    return stack(fields, attention, routed(fields, "num_experts", scoring="softmax", renormalise=renormalise))


FAMILY = Family(_layers, Naming(), defaults={"rms_norm_eps": 1e-5})
