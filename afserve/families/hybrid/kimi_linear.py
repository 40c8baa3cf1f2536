"""Kimi Linear (`KimiLinearForCausalLM`): delta nets that forget by channel, every fourth layer latent attention without
a rotary embedding; DeepSeek-V3's router."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.config_ranges import MOST_LAYERS, Range
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.ffn import sigmoid_groups, sparse_layers, stack
from afserve.families.reading.latent import still
from afserve.families.reading.layers import FULL, LINEAR, by_type
from afserve.spec_parts import AttentionSpec, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    for name, known in (("moe_router_activation_func", "sigmoid"), ("mla_use_nope", True)):
        fields.known_only(name, known)
    attention = by_type(fields, {LINEAR: _delta(fields), FULL: still(fields)}, _types(fields))
    moe = replace(sigmoid_groups(fields), scale=fields.number("routed_scaling_factor", default=2.446))
    return stack(fields, attention, moe, sparse_layers(fields, 1))


def _types(fields: ConfigFields) -> list[str]:
    """Layers are counted from 1 in `linear_attn_config`; without one layers 4, 8, ... from 0 see all of the context."""
    layers = fields.integer("num_hidden_layers")
    nets = _of_nets(fields)
    full = nets.integers("full_attn_layers", Range(1, MOST_LAYERS), MOST_LAYERS)
    if max(full, default=0) > layers:
        raise nets.refuse("full_attn_layers", f"names a layer beyond num_hidden_layers, {layers}")
    found = {layer - 1 for layer in full} if full else set(range(4, layers, 4))
    return [FULL if layer in found else LINEAR for layer in range(layers)]


def _delta(fields: ConfigFields) -> AttentionSpec:
    nets = _of_nets(fields)
    heads = nets.integer("num_heads", default=fields.integer("linear_num_heads", default=32))
    dim = nets.integer("head_dim", default=fields.integer("linear_head_dim", default=128))
    taps = fields.integer("linear_conv_kernel_dim", default=4)
    taps = nets.integer("short_conv_kernel_size", default=taps)
    return AttentionSpec("linear", heads, heads, dim, dim, taps=taps, rule="channel")


def _of_nets(fields: ConfigFields) -> ConfigFields:
    return fields.inner(fields.section("linear_attn_config"), "linear_attn_config")


RENAMES = (
    ("num_experts", "n_routed_experts"),
    ("num_experts_per_token", "num_experts_per_tok"),
    ("num_shared_experts", "n_shared_experts"),
    ("num_expert_group", "n_group"),
    ("moe_renormalize", "norm_topk_prob"),
    ("model_max_length", "max_position_embeddings"),
)
FAMILY = Family(
    _layers,
    Naming(moe="block_sparse_moe", gate="w1", up="w3", down="w2", linear="self_attn"),
    renames=RENAMES,
    defaults={"rms_norm_eps": 1e-5, "num_shared_experts": 1},
)
