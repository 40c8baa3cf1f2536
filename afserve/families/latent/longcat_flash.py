"""LongCat-Flash (`LongcatFlashForCausalLM`): one of its layers is two of ours, each with latent attention and a dense
FFN. The experts read what the first FFN reads, and are added behind the second; some of those that a router chooses
among compute nothing. Source: arXiv 2509.01322."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.ffn import check_top_k, routed
from afserve.families.reading.latent import mla
from afserve.spec_parts import AttentionSpec, DenseSpec, LayerSpec


def _count(fields: ConfigFields) -> int:
    """Of our layers, which transformers calls `num_hidden_layers`."""
    theirs = fields.optional("num_layers")
    ours = 2 * theirs if theirs else fields.optional("num_hidden_layers") or fields.integer("num_layers")
    if ours % 2:
        raise fields.refuse("num_hidden_layers", "is odd, and each layer has two attentions")
    return ours


_KNOWN = {
    "zero_expert_type": "identity",
    "norm_topk_prob": False,
    "router_bias": False,  # transformers has its tensor and adds none
    **dict.fromkeys(("mla_scale_q_lora", "mla_scale_kv_lora"), True),
}


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    for name, known in _KNOWN.items():
        fields.known_only(name, known)
    attention, inner = _attention(fields), fields.integer("ffn_hidden_size")
    scale, zero = fields.number("routed_scaling_factor", default=6.0), fields.optional("zero_expert_num") or 0
    moe = routed(
        fields, "n_routed_experts", top_k="moe_topk", inner="expert_ffn_hidden_size", scoring="softmax"
    )
    moe = replace(moe, shared_inner=inner, scale=scale, zero_experts=zero, correction_bias=True, late=True)
    check_top_k(fields, moe)
    dense = DenseSpec(inner, moe.activation)
    return (LayerSpec(attention, moe), LayerSpec(attention, dense)) * (_count(fields) // 2)


def _attention(fields: ConfigFields) -> AttentionSpec:
    """Queries and latents are multiplied as if their ranks were the hidden size; queries by the softmax's scale."""
    plain, hidden = mla(fields, interleaved=True, theta=1e7), fields.integer("hidden_size")
    if plain.q_lora_rank is None:
        raise fields.error("q_lora_rank: missing; queries are scaled by it", "q_lora_rank")
    scale = (hidden / plain.q_lora_rank / plain.head_dim) ** 0.5
    return replace(plain, scale=scale, latent_scale=(hidden / plain.kv_lora_rank) ** 0.5)


_NAMES = Naming(
    parts=2,
    count_field="num_layers",
    attention="self_attn.{part}",
    input_norm="input_layernorm.{part}.weight",
    post_norm="post_attention_layernorm.{part}.weight",
    dense_ffn="mlps.{part}",
    shared="",
    router_weight="router.classifier.weight",
    correction_bias="router.e_score_correction_bias",
)
FAMILY = Family(_layers, _NAMES, defaults={"rms_norm_eps": 1e-5}, count=_count)
