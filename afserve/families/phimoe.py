"""Phi-3.5-MoE (`PhimoeForCausalLM`): LayerNorm with biases, two experts chosen one after the other (sparse mixer)."""

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import Naming
from afserve.families.read_attention import gqa
from afserve.families.read_ffn import activation, stack
from afserve.spec_parts import Around, LayerSpec, MoeSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = gqa(
        fields,
        theta=1e6,
        bias=fields.flag("attention_bias", False),
        window=fields.optional("sliding_window"),
    )
    moe = MoeSpec(
        experts=fields.integer("num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        inner=fields.integer("intermediate_size"),
        shared_inner=0,
        scoring="sparse_mixer",
        jitter=fields.number("router_jitter_noise", default=0.01),
        activation=activation(fields),
    )
    if moe.top_k != 2:
        raise fields.refuse("num_experts_per_tok", "is not 2, which is how many the sparse mixer chooses")
    return stack(fields, attention, moe, range(fields.integer("num_hidden_layers")), 0)


def _around(fields: ConfigFields) -> Around:
    return Around(centred=True, norm_bias=True, head_bias=fields.flag("lm_head_bias", False))


FAMILY = Family(
    _layers,
    Naming(moe="block_sparse_moe", gate="w1", up="w3", down="w2"),
    _around,
    defaults={"rms_norm_eps": 1e-5},
)
