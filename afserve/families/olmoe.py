"""OLMoE (`OlmoeForCausalLM`): attention with norms over the width of all heads, softmax router."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import Naming
from afserve.families.read_attention import clip_qkv, gqa
from afserve.families.read_ffn import activation, stack
from afserve.spec_parts import LayerSpec, MoeSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    bias = fields.flag("attention_bias", False)
    attention = replace(gqa(fields, theta=10000.0, qk_norm="width", bias=bias), clip=clip_qkv(fields))
    moe = MoeSpec(
        experts=fields.integer("num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        inner=fields.integer("intermediate_size"),
        shared_inner=0,
        scoring="softmax",
        renormalise=fields.flag("norm_topk_prob", False),
        activation=activation(fields),
    )
    return stack(fields, attention, moe, range(fields.integer("num_hidden_layers")), 0)


FAMILY = Family(_layers, Naming(), defaults={"rms_norm_eps": 1e-5})
