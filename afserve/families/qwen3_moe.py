"""Qwen3-MoE (`Qwen3MoeForCausalLM`): GQA with norms on queries and keys, softmax router."""

from afserve.config_json import ConfigFields
from afserve.config_ranges import LAYER_COUNT, MOST_LAYERS
from afserve.families.family import Family
from afserve.families.naming import Naming
from afserve.families.read_attention import gqa
from afserve.families.read_ffn import activation, stack
from afserve.spec_parts import LayerSpec, MoeSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    window = fields.optional("sliding_window") if fields.flag("use_sliding_window", False) else None
    bias = fields.flag("attention_bias", False)
    attention = gqa(fields, theta=10000.0, qk_norm=True, bias=bias, window=window)
    moe = MoeSpec(
        experts=fields.integer("num_experts", "num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        inner=fields.integer("moe_intermediate_size"),
        shared_inner=0,
        scoring="softmax",
        renormalise=fields.flag("norm_topk_prob", False),
        activation=activation(fields),
    )
    return stack(fields, attention, moe, _routed(fields), fields.optional("intermediate_size") or 0)


def _routed(fields: ConfigFields) -> frozenset[int]:
    step = fields.integer("decoder_sparse_step", default=1)
    dense = frozenset(fields.integers("mlp_only_layers", LAYER_COUNT, MOST_LAYERS))
    layers = range(fields.integer("num_hidden_layers"))
    return frozenset(i for i in layers if i not in dense and (i + 1) % step == 0)


FAMILY = Family(_layers, Naming())
