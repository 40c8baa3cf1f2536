"""GLM-4.5 and 4.6 (`Glm4MoeForCausalLM`): a rotary embedding of half a head, sigmoid router with a selection bias."""

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import Naming
from afserve.families.read_attention import gqa
from afserve.families.read_ffn import activation, check_groups, dense_then_moe, shared_inner, stack
from afserve.spec_parts import LayerSpec, MoeSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = gqa(
        fields,
        theta=10000.0,
        partial=0.5,
        qk_norm="head" if fields.flag("use_qk_norm", False) else "",
        bias=fields.flag("attention_bias", False),
        out_bias=False,
    )
    moe = MoeSpec(
        experts=fields.integer("n_routed_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        inner=fields.integer("moe_intermediate_size"),
        shared_inner=shared_inner(fields),
        scoring="sigmoid",
        selection="group_top2_sum",
        groups=fields.integer("n_group", default=1),
        top_groups=fields.integer("topk_group", default=1),
        renormalise=fields.flag("norm_topk_prob", True),
        epsilon=1e-20,
        scale=fields.number("routed_scaling_factor", default=1.0),
        correction_bias=True,
        activation=activation(fields),
    )
    check_groups(fields, moe, least=2)
    return stack(fields, attention, moe, dense_then_moe(fields, 1), fields.integer("intermediate_size"))


FAMILY = Family(_layers, Naming(), defaults={"rms_norm_eps": 1e-5, "n_shared_experts": 1})
