"""Mixtral (`MixtralForCausalLM`): GQA, softmax router, experts named w1 (gate), w3 (up), w2 (down)."""

from afserve.config_json import ConfigFields
from afserve.families.family import Family
from afserve.families.naming import Naming
from afserve.families.read_attention import gqa
from afserve.families.read_ffn import activation, stack
from afserve.spec_parts import LayerSpec, MoeSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = gqa(fields, theta=1e6, window=fields.optional("sliding_window"))
    moe = MoeSpec(
        experts=fields.integer("num_local_experts", "num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        inner=fields.integer("intermediate_size"),
        shared_inner=0,
        scoring="softmax",
        renormalise=True,
        activation=activation(fields),
    )
    return stack(fields, attention, moe, range(fields.integer("num_hidden_layers")), 0)


FAMILY = Family(_layers, Naming(moe="block_sparse_moe", gate="w1", up="w3", down="w2"))
