"""LFM2 MoE (`Lfm2MoeForCausalLM`): most layers are a gated short convolution, the others grouped-query attention."""

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import dense_then_moe, routed, stack
from afserve.families.reading.layers import FULL, by_type
from afserve.spec_parts import AttentionSpec, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    each = {FULL: gqa(fields, theta=1e6, qk_norm="head"), "conv": _convolution(fields)}
    moe = routed(
        fields,
        "num_experts",
        inner="moe_intermediate_size",
        scoring="sigmoid",
        renormalise=fields.flag("norm_topk_prob", True),
        epsilon=1e-6,
        scale=fields.number("routed_scaling_factor", default=1.0),
        correction_bias=fields.flag("use_expert_bias", True),
    )
    return stack(fields, by_type(fields, each), moe, dense_then_moe(fields, 2))


def _convolution(fields: ConfigFields) -> AttentionSpec:
    bias, taps = fields.flag("conv_bias", False), fields.integer("conv_L_cache", default=3)
    return AttentionSpec(
        "conv", fields.integer("hidden_size"), 1, 1, 1, taps=taps, qkv_bias=bias, out_bias=bias
    )


FAMILY = Family(
    _layers,
    Naming(
        moe="feed_forward",
        gate="w1",
        up="w3",
        down="w2",
        dense_ffn="feed_forward",
        dense_parts=("w1", "w3", "w2"),
        correction_bias="expert_bias",
        linear="conv",
        out="out_proj",
        q_norm="q_layernorm.weight",
        k_norm="k_layernorm.weight",
        input_norm="operator_norm.weight",
        post_norm="ffn_norm.weight",
        last_norm="embedding_norm.weight",
    ),
    renames=(
        ("norm_eps", "rms_norm_eps"),
        ("num_dense_layers", "first_k_dense_replace"),
        ("tie_embedding", "tie_word_embeddings"),
    ),
    defaults={"norm_eps": 1e-5, "tie_embedding": True},
)
