"""dots.llm1 (`Dots1ForCausalLM`) and Hy3 (`HYV3ForCausalLM`): GQA with norms by head beside DeepSeek-V3's router."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import dense_then_moe, sigmoid_groups, sparse_layers, stack
from afserve.families.reading.layers import FULL, SLIDING, by_type
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    bias, window = fields.flag("attention_bias", False), fields.optional("sliding_window")
    full = gqa(fields, theta=10000.0, qk_norm="head", bias=bias)
    each = {FULL: full, SLIDING: replace(full, window=window)}
    layers = fields.integer("num_hidden_layers")
    first = fields.integer("max_window_layers", default=layers)
    otherwise = [SLIDING if layer >= first else FULL for layer in range(layers)]
    attention = by_type(fields, each, otherwise)
    return stack(fields, attention, sigmoid_groups(fields, "noaux_tc"), dense_then_moe(fields, 0))


def _hy_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = gqa(fields, theta=11158840.0, qk_norm="head", bias=fields.flag("attention_bias", False))
    moe = replace(sigmoid_groups(fields), shared_bias=fields.flag("mlp_bias", False))
    return stack(fields, attention, moe, sparse_layers(fields, 1))


FAMILY = Family(_layers, Naming(), defaults={"norm_topk_prob": False})
HY3 = Family(
    _hy_layers,
    Naming(router_weight="router.gate.weight", correction_bias="expert_bias", shared="shared_mlp"),
    renames=(
        ("num_experts", "n_routed_experts"),
        ("num_shared_experts", "n_shared_experts"),
        ("router_scaling_factor", "routed_scaling_factor"),
    ),
    defaults={"rms_norm_eps": 1e-5, "num_shared_experts": 1, "router_scaling_factor": 2.826},
)
