"""Nemotron 3 (`NemotronHForCausalLM`): a layer is one block with one norm, of Mamba-2, attention without a rotary
embedding, routed experts or a dense FFN. FFNs are relu(up)^2 without gates; where config.json has a `moe_latent_size`,
routed experts work on rows of that size. Steps of a state are held within `time_step_limit`, which is all of them, in
prompts as in answers; transformers holds those of prompts at `time_step_min` or above, and no others."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.blocks import MLP, MOE, block_count, blocks
from afserve.families.reading.ffn import check_top_k, sigmoid_groups
from afserve.families.reading.layers import FULL, LINEAR
from afserve.spec_parts import NO_ATTENTION, NO_FFN, SQUARED_RELU, AttentionSpec, DenseSpec, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    fields.known_only("mlp_hidden_act", SQUARED_RELU)
    fields.known_only("sliding_window")
    fields.known_only("residual_in_fp32", False)
    kinds = blocks(fields)
    read = {LINEAR: _mamba, FULL: _attention, MOE: _experts, MLP: _dense}
    each = {kind: read[kind](fields) for kind in dict.fromkeys(kinds)}
    return tuple(each[kind] for kind in kinds)


def _attention(fields: ConfigFields) -> LayerSpec:
    fields.known_only("attention_bias", False)
    heads, dim = fields.integer("num_attention_heads"), fields.integer("head_dim", default=128)
    groups = fields.integer("num_key_value_heads", default=heads)
    _divides(fields, "num_key_value_heads", groups, heads, "num_attention_heads")
    return LayerSpec(AttentionSpec("gqa", heads, groups, dim, dim), NO_FFN)


def _mamba(fields: ConfigFields) -> LayerSpec:
    fields.known_only("use_bias", False)
    fields.known_only("mamba_hidden_act", "silu")
    fields.known_only("time_step_limit", [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
    heads, groups = fields.integer("mamba_num_heads", default=128), fields.integer("n_groups", default=8)
    _divides(fields, "n_groups", groups, heads, "mamba_num_heads")
    state = AttentionSpec(
        "linear",
        heads,
        groups,
        head_dim=fields.integer("ssm_state_size", default=128),
        value_dim=fields.integer("mamba_head_dim", default=64),
        taps=fields.integer("conv_kernel", default=4),
        rule="sum",
        qkv_bias=fields.flag("use_conv_bias", True),
    )
    return LayerSpec(state, NO_FFN)


def _divides(fields: ConfigFields, name: str, groups: int, heads: int, of: str) -> None:
    if heads % groups:
        raise fields.refuse(name, f"does not divide the {heads} of {of}")


def _dense(fields: ConfigFields) -> LayerSpec:
    return LayerSpec(
        NO_ATTENTION, DenseSpec(fields.integer("intermediate_size"), SQUARED_RELU, _bias(fields))
    )


def _experts(fields: ConfigFields) -> LayerSpec:
    fields.known_only("n_shared_experts", 1)
    moe = replace(
        sigmoid_groups(fields),
        activation=SQUARED_RELU,
        shared_inner=fields.integer("moe_shared_expert_intermediate_size"),
        shared_bias=_bias(fields),
        latent=fields.optional("moe_latent_size") or 0,
    )
    check_top_k(fields, moe)
    return LayerSpec(NO_ATTENTION, moe)


def _bias(fields: ConfigFields) -> bool:
    """Of all FFNs but the routed experts."""
    return fields.flag("mlp_bias", False)


FAMILY = Family(
    _layers,
    Naming(
        stem="backbone",
        embed="embeddings.weight",
        last_norm="norm_f.weight",
        input_norm="norm.weight",
        post_norm="norm.weight",
        attention="mixer",
        linear="mixer",
        moe="mixer",
        dense_ffn="mixer",
    ),
    renames=(("layer_norm_epsilon", "rms_norm_eps"),),
    defaults={"rms_norm_eps": 1e-5},
    count=block_count,
)
