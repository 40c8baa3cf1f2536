"""Mixtral (`MixtralForCausalLM`): GQA, softmax router, experts named w1 (gate), w3 (up), w2 (down)."""

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import routed, stack
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = gqa(fields, theta=1e6, window=fields.optional("sliding_window"))
    moe = routed(fields, "num_local_experts", "num_experts", scoring="softmax", renormalise=True)
    return stack(fields, attention, moe)


FAMILY = Family(_layers, Naming(moe="block_sparse_moe", gate="w1", up="w3", down="w2"))
