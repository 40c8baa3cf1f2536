"""Qwen1.5-MoE and Qwen2-MoE (`Qwen2MoeForCausalLM`): biases of q, k and v, softmax router, a gated shared expert."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import gated_shared, sparse_steps, stack
from afserve.families.reading.layers import FULL, SLIDING, by_type
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Windows are those of `layer_types`, or of every other one of the first `max_window_layers`."""
    full = gqa(fields, theta=10000.0, bias=fields.flag("qkv_bias", True), out_bias=False)
    moe, moe_ids = gated_shared(fields, renormalise=False), sparse_steps(fields)
    if not fields.flag("use_sliding_window", False):
        return stack(fields, full, moe, moe_ids)
    each = {FULL: full, SLIDING: replace(full, window=fields.integer("sliding_window"))}
    most, layers = fields.integer("max_window_layers", default=28), fields.integer("num_hidden_layers")
    otherwise = [SLIDING if layer % 2 == 0 and layer < most else FULL for layer in range(layers)]
    return stack(fields, by_type(fields, each, otherwise), moe, moe_ids)


FAMILY = Family(_layers, Naming(shared="shared_expert"))
