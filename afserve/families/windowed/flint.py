"""Flint (`FlintForCausalLM`): sinks in every layer; layers with windows turn heads, full ones do not."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import beside_shared, sparse_steps, stack
from afserve.families.reading.layers import FULL, SLIDING, by_type, narrow_ones_turn
from afserve.spec_parts import AttentionSpec, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    moe = beside_shared(fields, "sigmoid", renormalise=fields.flag("norm_topk_prob", True))
    return stack(fields, _attention(fields), moe, sparse_steps(fields))


def _attention(fields: ConfigFields) -> list[AttentionSpec]:
    """The first two layers, every fourth one and the last see all of the context."""
    bias, last = fields.flag("attention_bias", False), fields.integer("num_hidden_layers") - 1
    turned = replace(gqa(fields, theta=10000.0, qk_norm="head", bias=bias), sinks=True)
    each = narrow_ones_turn(turned, fields.integer("sliding_window", default=513))
    full = {0, 1, last, *range(1, last, 4)}
    return by_type(fields, each, [FULL if layer in full else SLIDING for layer in range(last + 1)])


FAMILY = Family(
    _layers,
    Naming(shared="shared_expert", sinks="softmax_offset"),
    defaults={"shared_expert_intermediate_size": 1024, "mlp_only_layers": [0, 1]},
)
