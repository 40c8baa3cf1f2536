"""Mellum 2 (`MellumForCausalLM`): Qwen3's layers with a window and a rotary embedding for each type."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import softmax, sparse_layers, stack
from afserve.families.reading.layers import FULL, SLIDING, by_type
from afserve.families.reading.rope import of_type
from afserve.spec_parts import AttentionSpec, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    window = fields.integer("sliding_window", default=1024)
    each = {FULL: _of(fields, FULL, 5e5), SLIDING: replace(_of(fields, SLIDING, 1e4), window=window)}
    moe = softmax(fields, renormalise=True)
    return stack(fields, by_type(fields, each), moe, sparse_layers(fields, 0))


def _of(fields: ConfigFields, name: str, theta: float) -> AttentionSpec:
    bias = fields.flag("attention_bias", False)
    return gqa(of_type(fields, name), theta=theta, qk_norm="head", bias=bias)


FAMILY = Family(_layers, Naming())
