"""Granite with windows (`GraniteMoeSWAForCausalLM`): Granite MoE with sinks, and a rotary embedding for each layer, or
none."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.config_ranges import LAYER_THETA
from afserve.families.grouped import granitemoe
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import StackedNames
from afserve.families.reading.ffn import stack
from afserve.families.reading.layers import FULL, SLIDING, by_type, layer_numbers
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    fields.known_only("shared_intermediate_size", 0)
    full = replace(granitemoe.attention(fields), sinks=True)
    each = {FULL: full, SLIDING: replace(full, window=fields.integer("sliding_window", default=128))}
    layers, rope = fields.integer("num_hidden_layers"), full.rope
    attention = by_type(fields, each, [SLIDING if layer % 4 else FULL for layer in range(layers)])
    thetas = layer_numbers(fields, "layer_rope_theta", LAYER_THETA)
    turned = [replace(rope, theta=theta) if rope and theta else None for theta in thetas] or [rope] * layers
    attention = [replace(one, rope=turn) for one, turn in zip(attention, turned, strict=True)]
    return stack(fields, attention, granitemoe.experts(fields))


_STACKED = StackedNames(gate_up="experts.gate_up_proj", down="experts.down_proj")
_NAMES = replace(granitemoe.NAMES, router_weight="router.weight", stacked=_STACKED)
FAMILY = Family(_layers, _NAMES, granitemoe.around)
