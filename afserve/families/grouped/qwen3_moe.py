"""Qwen3-MoE (`Qwen3MoeForCausalLM`): GQA with norms on queries and keys, softmax router; and Qwen3-VL-MoE
(`Qwen3VLMoeForConditionalGeneration`), whose router always renormalises. A text's positions are the same in all three
sections of its rotary embedding: it is the plain one. Those of pictures are not, and its encoder says how they turn."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family, beside_vision
from afserve.families.pattern.naming import Naming, StackedNames
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import softmax, sparse_steps, stack
from afserve.families.reading.vision import deep_encoder
from afserve.spec_parts import LayerSpec, MoeSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    return _with(fields, softmax(fields, renormalise=False))


def _renormalised(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    return _with(fields, replace(softmax(fields, renormalise=True), renormalise=True))


def _with(fields: ConfigFields, moe: MoeSpec) -> tuple[LayerSpec, ...]:
    window = fields.optional("sliding_window") if fields.flag("use_sliding_window", False) else None
    bias = fields.flag("attention_bias", False)
    attention = gqa(fields, theta=10000.0, qk_norm="head", bias=bias, window=window)
    return stack(fields, attention, moe, sparse_steps(fields))


FAMILY = Family(_layers, Naming())
_STACKED = StackedNames("experts.gate_up_proj", "experts.down_proj", transposed=True)
_TEXT = beside_vision(Family(_renormalised, Naming(stacked=_STACKED)), "model.language_model")
WITH_VISION = replace(_TEXT, encoder=deep_encoder)
