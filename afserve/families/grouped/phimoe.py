"""Phi-3.5-MoE (`PhimoeForCausalLM`): LayerNorm with biases, two experts chosen one after the other (sparse mixer)."""

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import routed, stack
from afserve.spec_parts import Around, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    bias, window = fields.flag("attention_bias", False), fields.optional("sliding_window")
    attention = gqa(fields, theta=1e6, bias=bias, window=window)
    jitter = fields.number("router_jitter_noise", default=0.01)
    moe = routed(fields, "num_local_experts", scoring="sparse_mixer", jitter=jitter)
    if moe.top_k != 2:
        raise fields.refuse("num_experts_per_tok", "is not 2, which is how many the sparse mixer chooses")
    return stack(fields, attention, moe)


def _around(fields: ConfigFields) -> Around:
    return Around(centred=True, norm_bias=True, head_bias=fields.flag("lm_head_bias", False))


FAMILY = Family(
    _layers,
    Naming(moe="block_sparse_moe", gate="w1", up="w3", down="w2"),
    _around,
    defaults={"rms_norm_eps": 1e-5},
)
