"""Qwen3.5-MoE without its vision part (`Qwen3_5MoeForCausalLM`): Qwen3-Next's layers with projections apart.

The router always renormalises. Experts have tensors of their own, or lie in those of all experts. A text's positions
are the same in all three sections of the rotary embedding, so it is the plain one.
"""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import Naming, StackedNames
from afserve.families.qwen3_next import around, layers
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    return tuple(
        replace(layer, ffn=replace(layer.moe, renormalise=True)) if layer.moe else layer
        for layer in layers(fields)
    )


TEXT = Naming(
    shared="shared_expert",
    linear_parts=True,
    stacked=StackedNames("experts.gate_up_proj", "experts.down_proj", sometimes=True),
)
FAMILY = Family(_layers, TEXT, around)
WITH_VISION = replace(FAMILY, naming=replace(TEXT, stem="model.language_model"), sections=("text_config",))
