"""K-EXAONE (`ExaoneMoeForCausalLM`): DeepSeek-V3's router; layers with windows turn heads, full ones do not."""

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import sigmoid_groups, sparse_layers, stack
from afserve.families.reading.layers import FULL, SLIDING, by_type, narrow_ones_turn
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    turned, window = gqa(fields, theta=10000.0, qk_norm="head"), fields.optional("sliding_window")
    each = narrow_ones_turn(turned, window) if window else {SLIDING: turned, FULL: turned}
    attention = by_type(fields, each, every=fields.integer("sliding_window_pattern", default=4))
    return stack(fields, attention, sigmoid_groups(fields), sparse_layers(fields, 1))


FAMILY = Family(
    _layers,
    Naming(correction_bias="e_score_correction_bias"),
    renames=(("num_experts", "n_routed_experts"), ("num_shared_experts", "n_shared_experts")),
    defaults={"rms_norm_eps": 1e-5, "num_shared_experts": 1, "routed_scaling_factor": 2.5},
)
