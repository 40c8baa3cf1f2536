"""Qwen3-MoE (`Qwen3MoeForCausalLM`): GQA with norms on queries and keys, softmax router."""

from afserve.models.naming import Naming

NAMING = Naming(moe="mlp", gate="gate_proj", up="up_proj", down="down_proj")
