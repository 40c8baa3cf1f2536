"""DeepSeek-V2 and V2-Lite (`DeepseekV2ForCausalLM`): MLA, softmax router, shared experts."""

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import Naming
from afserve.families.read_attention import mla
from afserve.families.read_ffn import check_groups, dense_then_moe, routed, shared_inner, stack
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = mla(fields, interleaved=True)
    fields.known_only("scoring_func", "softmax")
    fields.known_only("norm_topk_prob", False)
    fields.known_only("topk_method", "greedy", "group_limited_greedy")
    grouped = fields.config.get("topk_method") == "group_limited_greedy"
    moe = routed(
        fields,
        *("n_routed_experts", "num_experts", "num_local_experts"),
        inner="moe_intermediate_size",
        shared_inner=shared_inner(fields),
        scoring="softmax",
        selection="group_max" if grouped else "plain",
        groups=fields.integer("n_group") if grouped else 1,
        top_groups=fields.integer("topk_group") if grouped else 1,
        scale=fields.number("routed_scaling_factor", default=1.0),
        closed_to_zero=True,
    )
    check_groups(fields, moe, least=1)
    return stack(fields, attention, moe, dense_then_moe(fields, 0), fields.integer("intermediate_size"))


FAMILY = Family(_layers, Naming())
