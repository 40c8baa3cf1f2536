"""DeepSeek-V2 and V2-Lite (`DeepseekV2ForCausalLM`): MLA, softmax router, shared experts; and Mistral Small 4
(`Mistral4ForCausalLM`, or inside of `Mistral3ForConditionalGeneration`), whose queries are scaled by position."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import Naming, StackedNames
from afserve.families.reading.attention import mla
from afserve.families.reading.ffn import check_groups, dense_then_moe, routed, shared_inner, stack
from afserve.spec_parts import LayerSpec, MoeSpec

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = mla(fields, interleaved=True)
    fields.known_only("scoring_func", "softmax")
    fields.known_only("norm_topk_prob", False)
    fields.known_only("topk_method", "greedy", "group_limited_greedy")
    grouped = fields.config.get("topk_method") == "group_limited_greedy"
    moe = replace(
        _moe(fields),
        selection="group_max" if grouped else "plain",
        groups=fields.integer("n_group") if grouped else 1,
        top_groups=fields.integer("topk_group") if grouped else 1,
    )
    check_groups(fields, moe, least=1)
    return stack(fields, attention, moe, dense_then_moe(fields, 0), fields.integer("intermediate_size"))


def _moe(fields: ConfigFields) -> MoeSpec:
    """Without groups."""
    return routed(
        fields,
        *_EXPERTS,
        inner="moe_intermediate_size",
        shared_inner=shared_inner(fields),
        scoring="softmax",
        scale=fields.number("routed_scaling_factor", default=1.0),
        closed_to_zero=True,
    )


def _mistral4_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = mla(fields, interleaved=fields.flag("rope_interleave", True))
    rope = fields.inner(fields.section("rope_parameters"), "rope_parameters")
    if rope.has("llama_4_scaling_beta"):
        floor, scale = rope.integer("original_max_position_embeddings"), rope.number("llama_4_scaling_beta")
        attention = replace(attention, temperature=(floor, scale, 0))
    moe = replace(
        _moe(fields),
        selection="group_top2_sum",
        groups=fields.integer("n_group", default=1),
        top_groups=fields.integer("topk_group", default=1),
        renormalise=fields.flag("norm_topk_prob", True),
        epsilon=1e-20,
    )
    check_groups(fields, moe, least=2)
    return stack(fields, attention, moe, dense_then_moe(fields, 0), fields.integer("intermediate_size"))


def _wrapped_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Mistral 3's wrapper has one without experts too."""
    inner = fields.inner(fields.section("text_config"), "text_config")
    if inner.config.get("model_type") != "mistral4":
        raise inner.refuse("model_type", "is not supported; supported: mistral4")
    return _mistral4_layers(fields)


_MISTRAL4 = Naming(stacked=StackedNames("experts.gate_up_proj", "experts.down_proj", sometimes=True))
FAMILY = Family(_layers, Naming())
MISTRAL4 = Family(_mistral4_layers, _MISTRAL4, defaults={"n_shared_experts": 1})
MISTRAL4_WITH_VISION = replace(
    MISTRAL4,
    layers=_wrapped_layers,
    naming=replace(_MISTRAL4, stem="language_model.model", head="language_model.lm_head.weight"),
    sections=("text_config",),
)
