"""gpt-oss (`GptOssForCausalLM`): sinks, windows in every other layer, biases of experts, clamped SwiGLU."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming, StackedNames
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import activation, routed, stack
from afserve.families.reading.layers import FULL, SLIDING, by_type
from afserve.spec_parts import CLAMPED_SWIGLU, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    bias = fields.flag("attention_bias", True)
    full = replace(gqa(fields, theta=150000.0, bias=bias), sinks=True)
    narrow = replace(full, window=fields.integer("sliding_window", default=128))
    if activation(fields) != "silu":
        raise fields.refuse("hidden_act", "is not silu, which is what the clamped SwiGLU is made of")
    moe = routed(
        fields,
        *("num_local_experts", "num_experts"),
        scoring="topk_softmax",
        router_bias=True,
        expert_bias=True,
        activation=CLAMPED_SWIGLU,
        alpha=fields.number("swiglu_alpha", default=1.702),
        limit=fields.number("swiglu_limit", default=7.0),
    )
    return stack(fields, by_type(fields, {SLIDING: narrow, FULL: full}, every=2), moe)


FAMILY = Family(
    _layers,
    Naming(
        router_weight="router.weight",
        stacked=StackedNames("experts.gate_up_proj", "experts.down_proj", transposed=True, interleaved=True),
    ),
    defaults={"rms_norm_eps": 1e-5},
)
