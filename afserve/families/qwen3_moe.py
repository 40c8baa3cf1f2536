"""Qwen3-MoE (`Qwen3MoeForCausalLM`): GQA with norms on queries and keys, softmax router."""

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import Naming
from afserve.families.read_attention import gqa
from afserve.families.read_ffn import routed, sparse_steps, stack
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    window = fields.optional("sliding_window") if fields.flag("use_sliding_window", False) else None
    bias = fields.flag("attention_bias", False)
    attention = gqa(fields, theta=10000.0, qk_norm="head", bias=bias, window=window)
    moe = routed(
        fields,
        *("num_experts", "num_local_experts"),
        inner="moe_intermediate_size",
        scoring="softmax",
        renormalise=fields.flag("norm_topk_prob", False),
    )
    return stack(fields, attention, moe, sparse_steps(fields), fields.optional("intermediate_size") or 0)


FAMILY = Family(_layers, Naming())
