"""Tiny random checkpoints of the families that GGUF files are read of, within what llama.cpp's formats can say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

SIZES: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "initializer_range": 0.15, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None, "num_experts_per_tok": 3,
}  # fmt: skip
INNER = {"intermediate_size": 96, "moe_intermediate_size": 32}
QWEN3 = {**SIZES, **INNER, "head_dim": 24, "num_experts": 7, "norm_topk_prob": True}
YARN = {
    "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 32, "rope_theta": 150000.0,
}  # fmt: skip
MLA = {
    **SIZES, **INNER, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 20, "n_routed_experts": 8, "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}  # fmt: skip
GLM = {
    **SIZES, **INNER, "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
LOCAL = {**SIZES, "intermediate_size": 32, "num_local_experts": 6}

# name -> (transformers class, config fields)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", QWEN3),
    "qwen3-tied": (
        "Qwen3Moe",
        {**QWEN3, "num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen2": ("Qwen2Moe", {**SIZES, **INNER, "num_experts": 7, "shared_expert_intermediate_size": 64}),
    "olmoe": ("Olmoe", {**SIZES, "intermediate_size": 32, "num_experts": 9}),
    "mixtral": ("Mixtral", LOCAL),
    "mixtral-one-group": ("Mixtral", {**LOCAL, "num_key_value_heads": 1, "head_dim": 32}),
    "glm4": (
        "Glm4Moe",
        {**GLM, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    ),
    "glm4-groups": (
        "Glm4Moe",
        {**GLM, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "norm_topk_prob": False},
    ),
    "dots1": (
        "Dots1",
        {**GLM, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1,
         "topk_group": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "minimax": ("MiniMaxM2", {**LOCAL, "head_dim": 16, "rotary_dim": 8}),
    "qwen3.5": (
        "Qwen3_5Moe",
        {**QWEN3, "num_hidden_layers": 4, "full_attention_interval": 2, "head_dim": 16,
         "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
         "linear_key_head_dim": 12, "linear_value_head_dim": 20},
    ),
    "v2": (
        "DeepseekV2",
        {**MLA, "q_lora_rank": None, "n_group": None, "topk_group": None, "topk_method": "greedy"},
    ),
    "v2-groups": (
        "DeepseekV2",
        {**MLA, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0},
    ),
    "v3": (
        "DeepseekV3",
        {**MLA, "n_group": 4, "topk_group": 2, "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8}},
    ),
    "gptoss": (
        "GptOss",
        {**LOCAL, "head_dim": 16, "sliding_window": 6, "rope_parameters": YARN},
    ),
}  # fmt: skip


_CONFIG = {"Qwen3_5Moe": "TextConfig"}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A folder by its name in TINY; built on first use, seeded."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = build(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def build(name: str, folder: Path, **more: Any) -> Path:
    """Norms and biases are random too: transformers starts them at one and zero, where a wrong one would not be
    seen."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    family, fields = TINY[name]
    torch.manual_seed(len(name))
    model = getattr(transformers, family + "ForCausalLM")(
        getattr(transformers, family + _CONFIG.get(family, "Config"))(**{**fields, **more})
    )
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith(("bias", "sinks")) or (tensor.dim() == 1 and not tensor.any()):
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif tensor.dim() == 1 and "inv_freq" not in key:
                tensor.mul_(1 + torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return folder
