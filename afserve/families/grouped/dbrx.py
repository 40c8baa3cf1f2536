"""DBRX (`DbrxForCausalLM`): one projection for q, k and v, which is clipped; LayerNorm; fused experts."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming, StackedNames
from afserve.families.reading.attention import clip_qkv, gqa
from afserve.families.reading.ffn import routed, stack
from afserve.spec_parts import Around, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = replace(gqa(fields, theta=10000.0), clip=clip_qkv(fields))
    if fields.number("moe_normalize_expert_weights", default=1.0) != 1.0:
        raise fields.refuse(
            "moe_normalize_expert_weights", "is not 1, the only norm of weights that is supported"
        )
    moe = routed(
        fields,
        "moe_num_experts",
        top_k="moe_top_k",
        inner="ffn_hidden_size",
        scoring="softmax",
        renormalise=True,
        activation=str(fields.section("ffn_act_fn").get("name", "silu")),
    )
    return stack(fields, attention, moe)


def _around(fields: ConfigFields) -> Around:
    return Around(centred=True)


FAMILY = Family(
    _layers,
    Naming(
        moe="ffn",
        router_weight="router.layer.weight",
        stacked=StackedNames(gate_up="experts.mlp.w1", up="experts.mlp.v1", down="experts.mlp.w2", flat=True),
        attention="norm_attn_norm.attn",
        qkv="Wqkv",
        out="out_proj",
        input_norm="norm_attn_norm.norm_1.weight",
        post_norm="norm_attn_norm.norm_2.weight",
        stem="transformer",
        layers="blocks",
        embed="wte.weight",
        last_norm="norm_f.weight",
    ),
    _around,
    sections=("attn_config", "ffn_config"),
    renames=(
        ("d_model", "hidden_size"),
        ("n_heads", "num_attention_heads"),
        ("n_layers", "num_hidden_layers"),
        ("kv_n_heads", "num_key_value_heads"),
        ("max_seq_len", "max_position_embeddings"),
    ),
    defaults={"rms_norm_eps": 1e-5},
)
