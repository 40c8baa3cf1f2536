"""Flint (`FlintForCausalLM`): sinks in every layer; layers with windows turn heads, full ones do not."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import Naming
from afserve.families.reading.attention import gqa, layer_types
from afserve.families.reading.ffn import routed, sparse_steps, stack
from afserve.spec_parts import AttentionSpec, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    moe = routed(
        fields,
        "num_experts",
        inner="moe_intermediate_size",
        shared_inner=fields.integer("shared_expert_intermediate_size"),
        scoring="sigmoid",
        renormalise=fields.flag("norm_topk_prob", True),
    )
    return stack(fields, _attention(fields), moe, sparse_steps(fields), fields.integer("intermediate_size"))


def _attention(fields: ConfigFields) -> list[AttentionSpec]:
    bias = fields.flag("attention_bias", False)
    turned = replace(gqa(fields, theta=10000.0, qk_norm="head", bias=bias), sinks=True)
    narrow = replace(turned, window=fields.integer("sliding_window", default=513))
    each = {"sliding_attention": narrow, "full_attention": replace(turned, rope=None)}
    return [each[name] for name in _types(fields, *each)]


def _types(fields: ConfigFields, sliding: str, full: str) -> tuple[str, ...]:
    """`layer_types`, or all of the context for the first two layers, every fourth one and the last."""
    if fields.has("layer_types"):
        return layer_types(fields, sliding, full)
    last = fields.integer("num_hidden_layers") - 1
    return tuple(
        full if layer < 2 or layer % 4 == 1 or layer == last else sliding for layer in range(last + 1)
    )


FAMILY = Family(
    _layers,
    Naming(shared="shared_expert", sinks="softmax_offset"),
    defaults={"shared_expert_intermediate_size": 1024, "mlp_only_layers": [0, 1]},
)
