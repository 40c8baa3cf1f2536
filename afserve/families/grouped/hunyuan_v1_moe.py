"""Hunyuan-A13B (`HunYuanMoEV1ForCausalLM`): norms of queries and keys after the rotary embedding, softmax router."""

from afserve.config_json import ConfigFields
from afserve.config_ranges import EXPERTS, MOST_LAYERS
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import activation, stack
from afserve.spec_parts import LayerSpec, MoeSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    fields.known_only("use_cla", False)
    fields.known_only("use_qk_norm", True)
    fields.known_only("use_mixed_mlp_moe", True)
    attention = gqa(fields, theta=10000.0, qk_norm="late", bias=fields.flag("attention_bias", False))
    inner = fields.integer("intermediate_size")
    moe = MoeSpec(
        experts=_of_all_layers(fields, "num_experts"),
        top_k=_of_all_layers(fields, "moe_topk"),
        inner=inner,
        shared_inner=inner,
        scoring="softmax",
        renormalise=True,
        activation=activation(fields),
    )
    return stack(fields, attention, moe)


def _of_all_layers(fields: ConfigFields, name: str) -> int:
    """A number, or a list of one number for each layer."""
    if not isinstance(fields.config.get(name), list):
        return fields.integer(name)
    numbers = frozenset(fields.integers(name, EXPERTS, MOST_LAYERS))
    if len(numbers) != 1:
        raise fields.refuse(name, "is not the same for all layers, which afserve needs")
    return min(numbers)


FAMILY = Family(
    _layers,
    Naming(
        shared="shared_mlp",
        router_weight="gate.wg.weight",
        q_norm="query_layernorm.weight",
        k_norm="key_layernorm.weight",
    ),
    defaults={"rms_norm_eps": 1e-5},
)
