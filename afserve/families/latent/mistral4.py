"""Mistral Small 4 (`Mistral4ForCausalLM`, or inside of `Mistral3ForConditionalGeneration`): MLA with queries scaled by
position, DeepSeek-V2's experts in groups."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.latent.deepseek_v2 import experts
from afserve.families.pattern.family import Family, beside_vision
from afserve.families.pattern.naming import Naming, StackedNames
from afserve.families.reading.ffn import check_groups, dense_then_moe, stack
from afserve.families.reading.latent import mla
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = mla(fields)
    rope = fields.inner(fields.section("rope_parameters"), "rope_parameters")
    if rope.has("llama_4_scaling_beta"):
        floor, scale = rope.integer("original_max_position_embeddings"), rope.number("llama_4_scaling_beta")
        attention = replace(attention, temperature=(floor, scale, 0))
    moe = replace(
        experts(fields),
        selection="group_top2_sum",
        groups=fields.integer("n_group", default=1),
        top_groups=fields.integer("topk_group", default=1),
        renormalise=fields.flag("norm_topk_prob", True),
        epsilon=1e-20,
    )
    check_groups(fields, moe, least=2)
    return stack(fields, attention, moe, dense_then_moe(fields, 0))


def _wrapped_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Mistral 3's wrapper has one without experts too."""
    inner = fields.inner(fields.section("text_config"), "text_config")
    if inner.config.get("model_type") != "mistral4":
        raise inner.refuse("model_type", "is not supported; supported: mistral4")
    return _layers(fields)


_STACKED = StackedNames("experts.gate_up_proj", "experts.down_proj", sometimes=True)
FAMILY = Family(_layers, Naming(stacked=_STACKED), defaults={"n_shared_experts": 1})
WITH_VISION = beside_vision(
    replace(FAMILY, layers=_wrapped_layers), "language_model.model", "language_model.lm_head.weight"
)
