"""Mixtral (`MixtralForCausalLM`): GQA, softmax router, experts named w1 (gate), w3 (up), w2 (down)."""

from afserve.models.naming import Naming

NAMING = Naming(moe="block_sparse_moe", gate="w1", up="w3", down="w2")
