"""DeepSeek-V3 and V3.1 (`DeepseekV3ForCausalLM`): MLA, sigmoid router with a selection bias, shared expert."""

from afserve.models.naming import Naming

NAMING = Naming(
    moe="mlp",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    correction_bias="gate.e_score_correction_bias",
)
