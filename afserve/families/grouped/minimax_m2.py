"""MiniMax-M2 (`MiniMaxM2ForCausalLM`): norms over the width of all heads, partial rotary embedding, sigmoid router."""

from afserve.config_json import ConfigFields
from afserve.config_ranges import MOST_LAYERS
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import routed, stack
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    if any(kind != 1 for kind in fields.items("attn_type_list", MOST_LAYERS)):
        raise fields.refuse(
            "attn_type_list", "has layers other than 1, softmax attention, which are not supported"
        )
    fields.known_only("scoring_func", "sigmoid")
    fields.known_only("use_qk_norm", True)
    attention = gqa(fields, theta=5e6, qk_norm="width")
    moe = routed(fields, "num_local_experts", scoring="sigmoid", renormalise=True, correction_bias=True)
    return stack(fields, attention, moe)


FAMILY = Family(
    _layers,
    Naming(moe="block_sparse_moe", gate="w1", up="w3", down="w2", correction_bias="e_score_correction_bias"),
)
