"""Tiny random checkpoints of the families of this folder: transformers' classes, a few sizes, and shapes that are odd.

Norms and biases are random too: transformers starts them at one and zero, where a wrong one would not be seen.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "initializer_range": 0.15, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
ONE_GROUP = {"num_key_value_heads": 1}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0], "short_mscale": 1.2, "long_mscale": 1.4,
    "original_max_position_embeddings": 256,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 32, "rope_theta": 150000.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DBRX: dict[str, Any] = {
    "vocab_size": 211, "d_model": 48, "n_heads": 4, "n_layers": 3, "max_seq_len": 256, "initializer_range": 0.15,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
QWEN2 = {
    **SIZES, "intermediate_size": 80, "moe_intermediate_size": 24, "num_experts": 7, "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
GLM = {
    **SIZES, "intermediate_size": 80, "moe_intermediate_size": 24, "head_dim": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1,
}  # fmt: skip
MLA = {
    **GLM, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
}  # fmt: skip
MISTRAL = {**MLA, "first_k_dense_replace": 0, "num_key_value_heads": 4, "head_dim": 20}
MISTRAL_ROPE = {**YARN, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16}
LONGCAT = {
    **{name: value for name, value in SIZES.items() if name not in ("num_hidden_layers", "num_key_value_heads")},
    "num_layers": 2, "ffn_hidden_size": 80, "expert_ffn_hidden_size": 24, "head_dim": 8, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 20, "q_lora_rank": 28, "kv_lora_rank": 20, "n_routed_experts": 10,
    "zero_expert_num": 5, "moe_topk": 3, "routed_scaling_factor": 2.0,
}  # fmt: skip
AXK1 = {**MLA, "head_dim": 8, "num_key_value_heads": 4}
INDEXED = {  # with few heads many scores are 0, and transformers chooses any of equal ones
    **MLA, "num_key_value_heads": 4, "index_n_heads": 24, "index_head_dim": 16, "index_topk": 8, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
}  # fmt: skip
EXAONE = {
    **SIZES, "intermediate_size": 80, "moe_intermediate_size": 24, "head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 3,
}  # fmt: skip
GEMMA = {
    **SIZES, "intermediate_size": 80, "moe_intermediate_size": 24, "head_dim": 16, "num_experts": 6,
    "top_k_experts": 2, "global_head_dim": 24, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
    "sliding_window": 5,
}  # fmt: skip
FULL_FIRST = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
ERNIE = {**SIZES, "intermediate_size": 80, "moe_intermediate_size": 24, "moe_num_experts": 8, "moe_k": 2}
NEXT_ALL_MOE = {
    **SIZES, "num_hidden_layers": 4, "head_dim": 16, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32, "num_experts": 7, "num_experts_per_tok": 3, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
}  # fmt: skip
NEXT = {**NEXT_ALL_MOE, "intermediate_size": 80}
LOCAL = {**SIZES, "intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 2}
KIMI = {
    **MLA, "q_lora_rank": None, "num_key_value_heads": 4, "linear_head_dim": 12, "linear_num_heads": 4,
    "num_local_experts": 8,
}  # fmt: skip
LING = {
    **{name: value for name, value in KIMI.items() if name != "n_routed_experts" and "linear" not in name},
    "head_dim": 8, "kda_lower_bound": -0.3,
}  # fmt: skip
MAMBA = {"shared_intermediate_size": 32, "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 14}
NEMOTRON = {
    **{name: value for name, value in SIZES.items() if name != "num_hidden_layers"}, "head_dim": 16,
    "intermediate_size": 40, "moe_intermediate_size": 28, "moe_shared_expert_intermediate_size": 36,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2,
    "ssm_state_size": 16,
    "time_step_min": 1e-9,  # transformers holds steps of prompts above it, and none of single tokens
}  # fmt: skip
OLMOE = {**SIZES, "intermediate_size": 24, "num_experts": 9, "num_experts_per_tok": 3}

LARGE4 = {
    **{name: value for name, value in INDEXED.items() if name != "q_lora_rank"}, "num_hidden_layers": 4,
    "rope_parameters": {**YARN, "attention_factor": 1.0, "truncate": True},
}  # fmt: skip
MINIMAX = {
    **SIZES, "num_hidden_layers": 4, "head_dim": 16, "rotary_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "intermediate_size": 24,
    "dense_intermediate_size": 80, "shared_intermediate_size": 32, "num_local_experts": 6, "num_experts_per_tok": 2,
    "swiglu_limit": 0.4, "index_n_heads": 2, "index_head_dim": 12, "index_block_size": 4, "index_topk_blocks": 3,
    "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}  # fmt: skip
# What transformers has only beside a vision part: the model, its config, and what that has besides the text part.
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
BESIDE_VISION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "MistralLarge4": (
        "MistralLarge4ForConditionalGeneration", "MistralLarge4Config",
        {"vision_config": {"model_type": "pixtral", **VISION}},
    ),
    "MiniMaxM3": (
        "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLConfig",
        {"projector_hidden_size": 48, "vision_config": VISION},
    ),
}  # fmt: skip

# name -> (transformers class, config fields)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", {**OLMOE, "clip_qkv": 1.5}),
    "olmoe-one-group": ("Olmoe", {**OLMOE, **ONE_GROUP, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Moe", {**QWEN2, "mlp_only_layers": [0]}),
    "qwen2-windows": (
        "Qwen2Moe",
        {**QWEN2, **ONE_GROUP, "use_sliding_window": True, "sliding_window": 5, "norm_topk_prob": True},
    ),
    "qwen3-next": ("Qwen3Next", {**NEXT, "full_attention_interval": 2}),
    "qwen3-next-one-group": (
        "Qwen3Next",
        {**NEXT, **ONE_GROUP, "attention_bias": True, "mlp_only_layers": [1], "linear_num_key_heads": 3,
         "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3, "norm_topk_prob": False,
         "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
    ),
    "qwen3.5": ("Qwen3_5Moe", {**NEXT_ALL_MOE, "full_attention_interval": 3}),
    "glm4": ("Glm4Moe", {**GLM, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5}),
    "glm4-no-shared": (
        "Glm4Moe",
        {**GLM, **ONE_GROUP, "n_shared_experts": 0, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0,
         "partial_rotary_factor": 0.25},
    ),
    "glm4-lite": (
        "Glm4MoeLite",
        {**MLA, "mlp_layer_types": ["dense", "sparse", "sparse"], "routed_scaling_factor": 1.8,
         "num_key_value_heads": 4},
    ),
    "glm4-lite-odd": (
        "Glm4MoeLite",
        {**MLA, "mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None, "n_group": 2, "topk_group": 1,
         "rope_interleave": False, "attention_bias": True, "norm_topk_prob": False, "num_attention_heads": 3,
         "num_key_value_heads": 3},
    ),
    "deepseek32": ("DeepseekV32", INDEXED),
    "deepseek32-odd": (
        "DeepseekV32",
        {**INDEXED, "mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 4, "topk_group": 2, "index_topk": 5,
         "attention_bias": True, "num_attention_heads": 3, "num_key_value_heads": 3, "index_n_heads": 19,
         "index_head_dim": 10, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "glm5": (
        "GlmMoeDsa",
        {**INDEXED, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "glm5-odd": (
        "GlmMoeDsa",
        {**INDEXED, "num_hidden_layers": 5, "index_topk_freq": 2, "index_topk": 11, "num_attention_heads": 5,
         "num_key_value_heads": 5, "index_n_heads": 21, "index_head_dim": 8, "first_k_dense_replace": 2,
         "norm_topk_prob": False},
    ),
    "mistral4": ("Mistral4", {**MISTRAL, "rope_parameters": {**MISTRAL_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "mistral4-odd": (
        "Mistral4",
        {**MISTRAL, "first_k_dense_replace": 1, "q_lora_rank": None, "n_group": 4, "topk_group": 2,
         "n_shared_experts": 2, "rope_interleave": False, "attention_bias": True, "norm_topk_prob": False,
         "routed_scaling_factor": 1.8, "num_attention_heads": 3, "num_key_value_heads": 3, "rope_parameters":
         {**MISTRAL_ROPE, "original_max_position_embeddings": 11}},
    ),
    "solar": (
        "SolarOpen",
        {**GLM, "first_k_dense_replace": 0, "attention_bias": True, "routed_scaling_factor": 2.5,
         "rope_parameters": LLAMA3},
    ),
    "dots1": ("Dots1", {**GLM, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}),
    "dots1-windows": (
        "Dots1",
        {**GLM, **ONE_GROUP, "n_shared_experts": 1, "sliding_window": 5, "max_window_layers": 1, "n_group": 4,
         "topk_group": 2, "attention_bias": True},
    ),
    "hy3": ("HYV3", {**EXAONE, "first_k_dense_replace": 1}),
    "hy3-odd": (
        "HYV3",
        {**EXAONE, **ONE_GROUP, "mlp_layer_types": ["sparse", "dense", "sparse"], "num_shared_experts": 2,
         "router_scaling_factor": 1.5, "attention_bias": True},
    ),
    "exaone": (
        "ExaoneMoe",
        {**EXAONE, "num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 2, "n_group": 2,
         "topk_group": 1},
    ),
    "exaone-odd": (
        "ExaoneMoe",
        {**EXAONE, **ONE_GROUP, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention",
         "full_attention"], "mlp_layer_types": ["sparse", "dense", "sparse"], "norm_topk_prob": False},
    ),
    "mellum": (
        "Mellum",
        {**EXAONE, "num_hidden_layers": 4, "sliding_window": 6, "layer_types": FULL_FIRST, "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 500000.0, "attention_factor": 1.1},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }},
    ),
    "mellum-odd": (
        "Mellum",
        {**EXAONE, **ONE_GROUP, "num_experts": 7, "sliding_window": 3, "attention_bias": True, "norm_topk_prob": False,
         "layer_types": FULL_FIRST[1:], "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "flint": (
        "Flint",
        {**EXAONE, "num_hidden_layers": 5, "sliding_window": 5, "shared_expert_intermediate_size": 40,
         "layer_types": None},
    ),
    "flint-odd": (
        "Flint",
        {**EXAONE, **ONE_GROUP, "num_experts": 7, "sliding_window": 4, "shared_expert_intermediate_size": 24,
         "mlp_only_layers": [1], "layer_types": FULL_FIRST[1:], "attention_bias": True, "norm_topk_prob": False},
    ),
    "longcat": ("LongcatFlash", LONGCAT),
    "longcat-odd": (
        "LongcatFlash",
        {**LONGCAT, "num_layers": 3, "n_routed_experts": 7, "zero_expert_num": 11, "moe_topk": 5,
         "attention_bias": True, "num_attention_heads": 3, "q_lora_rank": 10, "v_head_dim": 14,
         "tie_word_embeddings": True, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "longcat-ngram": (
        "LongcatFlashNgram",
        {**LONGCAT, "emb_neighbor_num": 3, "emb_split_num": 1, "ngram_vocab_size_ratio": 3, "eos_token_id": 7},
    ),
    "longcat-ngram-odd": (
        "LongcatFlashNgram",
        {**LONGCAT, "n_routed_experts": 7, "emb_neighbor_num": 4, "emb_split_num": 3, "ngram_vocab_size_ratio": 1.5,
         "tie_word_embeddings": True},
    ),
    "axk1": ("AXK1", {**AXK1, "mlp_layer_types": ["dense", "sparse", "sparse"], "n_group": 4, "topk_group": 2}),
    "axk1-odd": (
        "AXK1",
        {**AXK1, "mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
         "rope_interleave": False, "attention_bias": True, "norm_topk_prob": False, "num_attention_heads": 3,
         "num_key_value_heads": 3, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "afmoe": (
        "Afmoe",
        {**EXAONE, "num_hidden_layers": 4, "sliding_window": 5, "num_dense_layers": 2, "route_scale": 2.8,
         "mup_enabled": True, "layer_types": FULL_FIRST},
    ),
    "afmoe-odd": (
        "Afmoe",
        {**EXAONE, **ONE_GROUP, "num_hidden_layers": 3, "sliding_window": 3, "num_experts": 7, "num_shared_experts": 1,
         "global_attn_every_n_layers": 2, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "cohere2": (
        "Cohere2Moe",
        {**OLMOE, "num_hidden_layers": 4, "sliding_window": 5, "head_dim": 16, "num_shared_experts": 2,
         "sliding_window_pattern": 3, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 80},
    ),
    "cohere2-odd": (
        "Cohere2Moe",
        {**OLMOE, **ONE_GROUP, "sliding_window": 3, "head_dim": 16, "num_shared_experts": 1, "rms_norm_eps": 1e-6,
         "expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum", "attention_bias": True,
         "layer_types": FULL_FIRST[1:], "mlp_layer_types": ["sparse", "dense", "sparse"], "logit_scale": 0.5,
         "tie_word_embeddings": False, "prefix_dense_sliding_window_pattern": 4},
    ),
    "lfm2": (
        "Lfm2Moe",
        {**EXAONE, "num_hidden_layers": 5, "num_dense_layers": 2, "routed_scaling_factor": 1.5, "norm_eps": 1e-5,
         "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]},
    ),
    "lfm2-odd": (
        "Lfm2Moe",
        {**EXAONE, **ONE_GROUP, "num_experts": 7, "num_dense_layers": 1, "conv_bias": True, "conv_L_cache": 5,
         "use_expert_bias": False, "norm_topk_prob": False, "tie_word_embeddings": False,
         "layer_types": ["full_attention", "conv", "conv"]},
    ),
    "kimi-linear": ("KimiLinear", {**KIMI, "num_hidden_layers": 5, "n_group": 2, "topk_group": 1}),
    "kimi-linear-odd": (
        "KimiLinear",
        {**KIMI, "layer_types": ["full_attention", "linear_attention", "linear_attention"], "linear_num_heads": 3,
         "linear_head_dim": 10, "linear_conv_kernel_dim": 3, "q_lora_rank": 28, "num_attention_heads": 3,
         "num_key_value_heads": 3, "norm_topk_prob": False, "n_shared_experts": 2,
         "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "ling": ("BailingHybrid", {**LING, "num_hidden_layers": 6, "layer_group_size": 3, "n_group": 2, "topk_group": 1}),
    "ling-odd": (
        "BailingHybrid",
        {**LING, "layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_attention_heads": 3,
         "short_conv_kernel_size": 3, "num_key_value_heads": 3, "kda_safe_gate": False, "n_group": 4,
         "topk_group": 3, "attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 2,
         "mlp_layer_types": ["sparse", "dense", "sparse"],
         "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {**LOCAL, **MAMBA, "num_hidden_layers": 4, "residual_multiplier": 0.35, "attention_multiplier": 0.2,
         "embedding_multiplier": 3.0, "logits_scaling": 2.0, "tie_word_embeddings": True,
         "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]},
    ),
    "granite4-odd": (
        "GraniteMoeHybrid",
        {**LOCAL, **MAMBA, **ONE_GROUP, "mamba_n_heads": 6, "mamba_d_head": 24, "mamba_expand": 3, "mamba_n_groups": 3,
         "mamba_d_state": 10, "mamba_d_conv": 3, "mamba_conv_bias": False, "position_embedding_type": "rope",
         "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "nemotron": (
        "NemotronH",
        {**NEMOTRON, "moe_latent_size": 20, "routed_scaling_factor": 2.5, "layers_block_type":
         ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "mlp"]},
    ),
    "nemotron-odd": (
        "NemotronH",
        {**NEMOTRON, **ONE_GROUP,
         "layers_block_type": ["moe", "linear_attention", "linear_attention", "moe", "full_attention"],
         "mlp_bias": True, "n_group": 4, "topk_group": 2, "mamba_num_heads": 9, "mamba_head_dim": 10, "n_groups": 3,
         "conv_kernel": 3, "ssm_state_size": 14, "use_conv_bias": False, "norm_topk_prob": False},
    ),
    "gemma4": (
        "Gemma4",
        {**GEMMA, "num_hidden_layers": 4, "layer_types": FULL_FIRST, "attention_k_eq_v": True,
         "global_head_dim": GEMMA["head_dim"], "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0},
    ),
    "gemma4-odd": (
        "Gemma4",
        {**GEMMA, "num_experts": 7, "top_k_experts": 3, "global_head_dim": 20, "attention_bias": True,
         "layer_types": FULL_FIRST[1:], "tie_word_embeddings": False, "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "laguna": (
        "Laguna",
        {**EXAONE, "shared_expert_intermediate_size": 40, "sliding_window": 5, "layer_types": FULL_FIRST[1:],
         "num_attention_heads_per_layer": [4, 6, 2], "moe_routed_scaling_factor": 2.5, "rope_parameters": {
            "full_attention": {**YARN, "attention_factor": 1.1, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}},
    ),
    "laguna-odd": (
        "Laguna",
        {**EXAONE, **ONE_GROUP, "num_experts": 7, "gating": "per-element", "shared_expert_intermediate_size": 24,
         "sliding_window": 3, "num_hidden_layers": 4, "layer_types": FULL_FIRST, "attention_bias": True,
         "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "num_attention_heads": 5},
    ),
    "mimo": (
        "MiMoV2Flash",
        {**GLM, "v_head_dim": 12, "num_hidden_layers": 4, "layer_types": FULL_FIRST, "sliding_window": 6,
         "attention_bias": True, "rope_parameters": {name: {"rope_type": "default", "rope_theta": theta,
         "partial_rotary_factor": 0.5} for name, theta in zip(FULL_FIRST, (5e6, 1e4), strict=False)}},
    ),
    "mimo-odd": (
        "MiMoV2Flash",
        {**GLM, **ONE_GROUP, "num_attention_heads": 6, "v_head_dim": 10, "n_group": 4, "topk_group": 2,
         "layer_types": FULL_FIRST[1:], "sliding_window": 3, "mlp_layer_types": ["sparse", "dense", "sparse"],
         "attention_value_scale": 0.5, "rope_parameters": {name: {"rope_type": "default", "rope_theta": 1e4,
         "partial_rotary_factor": 1.0} for name in FULL_FIRST[:2]}},
    ),
    "mistral-large4": ("MistralLarge4", LARGE4),
    "mistral-large4-odd": (
        "MistralLarge4",
        {**LARGE4, "num_hidden_layers": 6, "no_rope_layers": [1, 0, 1, 0, 1, 0], "kv_source_layers": [0, 1, 0, 1, 4, 1],
         "indexer_types": ["full", "shared", "full", "shared", "full", "shared"], "num_attention_heads": 3,
         "num_key_value_heads": 3, "index_topk": 5, "index_head_dim": 10, "index_n_heads": 19, "n_group": 4,
         "topk_group": 2, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse", "dense"]},
    ),
    "minimax-m3": ("MiniMaxM3", MINIMAX),
    "minimax-m3-odd": (
        "MiniMaxM3",
        {**MINIMAX, **ONE_GROUP, "num_hidden_layers": 3, "num_attention_heads": 3, "index_n_heads": 1,
         "index_block_size": 5, "index_local_blocks": 2, "index_head_dim": 18, "rotary_dim": 16,
         "rope_parameters": None,
         "layer_types": ["minimax_m3_sparse"] * 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "ernie": ("Ernie4_5_Moe", {**ERNIE, "use_bias": True}),
    "ernie-no-shared": (
        "Ernie4_5_Moe",
        {**ERNIE, **ONE_GROUP, "moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_interval": 2,
         "tie_word_embeddings": False},
    ),
    "hunyuan": ("HunYuanMoEV1", {**SIZES, "intermediate_size": 40, "num_experts": 6, "moe_topk": 2, "head_dim": 12}),
    "granite": (
        "GraniteMoe",
        {**LOCAL, "attention_multiplier": 0.2, "residual_multiplier": 0.35, "embedding_multiplier": 3.0,
         "logits_scaling": 2.0, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "granite-windows": (
        "GraniteMoeSWA",
        {**LOCAL, "num_hidden_layers": 5, "sliding_window": 5, "attention_multiplier": 0.2, "residual_multiplier": 0.35,
         "layer_rope_theta": [0, 10000.0, 500000.0, 0, 10000.0]},
    ),
    "granite-windows-odd": (
        "GraniteMoeSWA",
        {**LOCAL, **ONE_GROUP, "sliding_window": 3, "layer_types": FULL_FIRST[1:], "attention_bias": True,
         "attention_multiplier": 0.25, "embedding_multiplier": 2.0, "tie_word_embeddings": True},
    ),
    "phimoe": ("Phimoe", {**LOCAL, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2}),
    "phimoe-window": ("Phimoe", {**LOCAL, **ONE_GROUP, "sliding_window": 5, "rope_parameters": LONGROPE}),
    "minimax": ("MiniMaxM2", {**LOCAL, "head_dim": 16, "rotary_dim": 8}),
    "dbrx": (
        "Dbrx",
        {**DBRX, "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
         "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2}},
    ),
    "gptoss": ("GptOss", {**LOCAL, "head_dim": 16, "sliding_window": 6, "rope_parameters": YARN, "swiglu_limit": 1.0}),
    "llama4": (
        "Llama4",
        {**LOCAL, "head_dim": 16, "intermediate_size_mlp": 56, "num_experts_per_tok": 1, "num_hidden_layers": 4,
         "interleave_moe_layer_step": 2, "attention_chunk_size": 16, "floor_scale": 16, "attn_scale": 0.3},
    ),
    "llama4-top2": (
        "Llama4",
        {**LOCAL, **ONE_GROUP, "head_dim": 16, "intermediate_size_mlp": 56, "attention_chunk_size": 8,
         "no_rope_layers": [1, 0, 1], "use_qk_norm": False, "rope_parameters": LLAMA3},
    ),
}  # fmt: skip


def _many(experts: int, top_k: int, hidden: int, latent: int) -> tuple[str, dict[str, Any]]:
    more = {
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "hidden_size": hidden,
        "moe_latent_size": latent,
    }
    blocks = ["linear_attention", "moe", "full_attention", "moe"]
    return "NemotronH", {
        **NEMOTRON,
        **more,
        "layers_block_type": blocks,
        "initializer_range": 0.9 * hidden**-0.5,
    }


# Numbers of experts, choices and widths that others have caps for: as narrow as a test wants them, and whole.
LARGE = {
    "many-512-22": _many(512, 22, 64, 32),
    "many-896-16": _many(896, 16, 96, 48),
    "whole-512-22-1024": _many(512, 22, 4096, 1024),
    "whole-896-16-3584": _many(896, 16, 7168, 3584),
}
ALL = TINY | LARGE


def model_and_config(family: str) -> tuple[Any, Any]:
    """Their classes in transformers, or of a model that it has not in this folder."""
    import transformers

    model, config = _names(family)
    if family == "LongcatFlashNgram":
        from tests.families import ngrams

        return getattr(ngrams, model), getattr(ngrams, config)
    return getattr(transformers, model), getattr(transformers, config)


def _names(family: str) -> tuple[str, str]:
    if family in BESIDE_VISION:
        return BESIDE_VISION[family][:2]
    part = "Text" if family in ("Llama4", "Qwen3_5Moe", "Gemma4") else ""
    return f"{family}ForCausalLM", f"{family}{part}Config"


def build(name: str, folder: Path) -> Path:
    import warnings

    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    family, fields = ALL[name]
    torch.manual_seed(len(name))
    model_class, config = model_and_config(family)
    if family in BESIDE_VISION:
        fields = {"text_config": fields, **BESIDE_VISION[family][2]}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # a shared expert of no width
        model = model_class(config(**fields))
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith("A_log"):
                tensor.sub_(
                    4.0
                )  # most of a state is left behind every token, or what is in it would hardly matter
            elif key.endswith(("bias", "sinks")) or (tensor.dim() == 1 and not tensor.any()):
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif tensor.dim() == 1 and "inv_freq" not in key:
                tensor.mul_(1 + torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    if family == "KimiLinear":
        _put_dense_back(folder / "model.safetensors")
    return folder


def _put_dense_back(path: Path) -> None:
    """Published checkpoints have dense FFNs under `mlp`; transformers reads both and writes them as experts."""
    from safetensors.torch import load_file, save_file

    stored = load_file(path)
    dense = re.compile(r"(layers\.\d+\.)block_sparse_moe(\.(?:gate|up|down)_proj\.)")
    save_file(
        {dense.sub(r"\1mlp\2", name): tensor for name, tensor in stored.items()}, path, {"format": "pt"}
    )
