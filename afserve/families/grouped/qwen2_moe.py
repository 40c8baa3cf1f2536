"""Qwen1.5-MoE and Qwen2-MoE (`Qwen2MoeForCausalLM`): biases of q, k and v, softmax router, a gated shared expert."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import Naming
from afserve.families.reading.attention import gqa, layer_types
from afserve.families.reading.ffn import gated_shared, sparse_steps, stack
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = gqa(fields, theta=10000.0, bias=fields.flag("qkv_bias", True), out_bias=False)
    moe = gated_shared(fields, renormalise=False)
    layers = stack(fields, attention, moe, sparse_steps(fields))
    if not fields.flag("use_sliding_window", False):
        return layers
    narrow = replace(attention, window=fields.integer("sliding_window"))
    return tuple(
        replace(layer, attention=narrow) if limited else layer
        for layer, limited in zip(layers, _windows(fields), strict=True)
    )


def _windows(fields: ConfigFields) -> list[bool]:
    """Which layers see a window: those of `layer_types`, or every other one of the first `max_window_layers`."""
    if fields.has("layer_types"):
        return [
            name == "sliding_attention" for name in layer_types(fields, "full_attention", "sliding_attention")
        ]
    most = fields.integer("max_window_layers", default=28)
    return [layer % 2 == 0 and layer < most for layer in range(fields.integer("num_hidden_layers"))]


FAMILY = Family(_layers, Naming(shared="shared_expert"))
