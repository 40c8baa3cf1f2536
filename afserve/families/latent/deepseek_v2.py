"""DeepSeek-V2 and V2-Lite (`DeepseekV2ForCausalLM`): MLA, softmax router, shared experts."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.ffn import check_groups, dense_then_moe, routed, shared_inner, stack
from afserve.families.reading.latent import mla
from afserve.spec_parts import LayerSpec, MoeSpec

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = mla(fields, interleaved=True)
    fields.known_only("scoring_func", "softmax")
    fields.known_only("norm_topk_prob", False)
    fields.known_only("topk_method", "greedy", "group_limited_greedy")
    moe = experts(fields)
    if fields.config.get("topk_method") == "group_limited_greedy":
        groups, top = fields.integer("n_group"), fields.integer("topk_group")
        moe = replace(moe, selection="group_max", groups=groups, top_groups=top)
    check_groups(fields, moe, least=1)
    return stack(fields, attention, moe, dense_then_moe(fields, 0))


def experts(fields: ConfigFields) -> MoeSpec:
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


FAMILY = Family(_layers, Naming())
