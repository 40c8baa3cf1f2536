"""DeepSeek-V2 and V2-Lite (`DeepseekV2ForCausalLM`): MLA, softmax router, shared experts."""

from afserve.models.naming import Naming

NAMING = Naming(moe="mlp", gate="gate_proj", up="up_proj", down="down_proj")
