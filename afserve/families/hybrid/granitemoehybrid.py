"""Granite 4 with experts (`GraniteMoeHybridForCausalLM`): most layers are Mamba-2, the others Granite MoE's attention,
mostly without a rotary embedding; a shared expert beside Granite's."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.grouped import granitemoe
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming, StackedNames
from afserve.families.reading.ffn import stack
from afserve.families.reading.layers import FULL, LINEAR, by_type
from afserve.spec_parts import AttentionSpec, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    fields.known_only("position_embedding_type", "rope", "nope")
    full, state, moe = granitemoe.attention(fields), _mamba(fields), granitemoe.experts(fields)
    if fields.config.get("position_embedding_type") != "rope":
        full = replace(full, rope=None)
    each = {LINEAR: state, "mamba": state, FULL: full, "attention": full}
    shared = fields.integer("shared_intermediate_size", default=1024)
    return stack(fields, by_type(fields, each), replace(moe, shared_inner=shared, shared_scale=moe.scale))


def _mamba(fields: ConfigFields) -> AttentionSpec:
    fields.known_only("mamba_proj_bias", False)
    fields.known_only("time_step_limit", [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
    heads = fields.integer("mamba_n_heads", default=128)
    inner = fields.integer("mamba_expand", default=2) * fields.integer("hidden_size")
    dim = inner // heads if fields.config.get("mamba_d_head") == "auto" else fields.integer("mamba_d_head")
    if dim * heads != inner:
        raise fields.refuse(
            "mamba_n_heads", f"of mamba_d_head {dim} are not mamba_expand hidden_size, {inner}"
        )
    return AttentionSpec(
        "linear",
        heads,
        kv_heads=fields.integer("mamba_n_groups", default=1),
        head_dim=fields.integer("mamba_d_state", default=256),
        value_dim=dim,
        taps=fields.integer("mamba_d_conv", default=4),
        rule="sum",
        qkv_bias=fields.flag("mamba_conv_bias", True),
        out_scale=fields.number("residual_multiplier", default=1.0),
    )


_PREFIX = "block_sparse_moe"
FAMILY = Family(
    _layers,
    Naming(
        moe="",
        router_weight=f"{_PREFIX}.router.layer.weight",
        stacked=StackedNames(
            gate_up=f"{_PREFIX}.input_linear.weight", down=f"{_PREFIX}.output_linear.weight"
        ),
        shared="shared_mlp",
        shared_parts=("input_linear", "input_linear", "output_linear"),
        linear="mamba",
    ),
    granitemoe.around,
    defaults={"mamba_d_head": "auto"},
)
