"""Ling 3.0 (`BailingHybridForCausalLM`): delta nets that forget by channel, the last layer of each group latent
attention with a gate for each head; DeepSeek-V3's router, experts of some layers within limits. A layer of multi-token
prediction is passed over."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.hybrid.kimi_linear import RENAMES
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.ffn import sigmoid_groups, sparse_layers, stack, within
from afserve.families.reading.latent import mla
from afserve.families.reading.layers import FULL, LINEAR, by_type
from afserve.spec_parts import AttentionSpec, GateSpec, LayerSpec

_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
_KNOWN = {
    "linear_attention": "kda",
    "no_kda_lora": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "rope_interleave": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_qkv_bias": False,
}


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    for name, known in _KNOWN.items():
        fields.known_only(name, known)
    if "BailingMoeV2_5ForCausalLM" in str(fields.config.get("architectures")):
        raise fields.refuse("architectures", "is Ling 2.5, which is not supported; supported: Ling 3.0")
    layers, every = fields.integer("num_hidden_layers"), fields.integer("layer_group_size", default=6)
    if layers % every and not fields.has("layer_types"):
        raise fields.refuse(
            "layer_group_size", f"does not divide num_hidden_layers {layers}; add layer_types"
        )
    cut = {name: found[:layers] for name in _LIMITS if isinstance(found := fields.config.get(name), list)}
    full = replace(mla(fields, interleaved=True, theta=6e6), gate=GateSpec("heads"))
    attention = by_type(fields, {LINEAR: _delta(fields), FULL: full}, every=every)
    inner = fields.integer("moe_shared_expert_intermediate_size", "moe_intermediate_size")
    moe = replace(sigmoid_groups(fields), shared_inner=inner * fields.integer("n_shared_experts"))
    return within(fields.view(cut), stack(fields, attention, moe, sparse_layers(fields, 2)), *_LIMITS)


def _delta(fields: ConfigFields) -> AttentionSpec:
    """transformers saves `linear_head_dim`, and another number as `head_dim`."""
    heads, dim = (
        fields.integer("num_attention_heads"),
        fields.integer("linear_head_dim", "head_dim", default=128),
    )
    taps = fields.integer("short_conv_kernel_size", default=4)
    floor = fields.number("kda_lower_bound", default=-5.0) if fields.flag("kda_safe_gate", True) else None
    return AttentionSpec(
        "linear", heads, heads, dim, dim, None, taps=taps, rule="channel", direct=True, floor=floor
    )


FAMILY = Family(
    _layers,
    Naming(
        attention="attention",
        linear="attention",
        out="dense",
        embed="word_embeddings.weight",
        correction_bias="gate.expert_bias",
    ),
    renames=RENAMES,
    defaults={"n_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
)
