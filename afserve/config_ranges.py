"""What each number of a `config.json` may be: one row per field, for the engine's reader and for the planner's.

The ranges hold every published model with room to spare, and keep products of fields far from where 64 bits or a float
end: hidden size times inner size times experts is below 2^60. Whether a model fits a machine is for others to say.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers, or any finite ones; `open_low` leaves `low` itself out."""

    low: float
    high: float
    whole: bool = True
    open_low: bool = False

    def holds(self, value: object) -> bool:
        """No boolean is a number here, NaN is in no range, and an integer of any length is compared exactly."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        above = value > self.low if self.open_low else value >= self.low
        return above and value <= self.high

    def __str__(self) -> str:
        kind, bracket = "a whole number" if self.whole else "a number", "(" if self.open_low else "["
        return f"{kind} in {bracket}{self.low:{self._form}}, {self.high:{self._form}}]"

    @property
    def _form(self) -> str:
        return "d" if self.whole else "g"


def _real(low: float, high: float, *, open_low: bool = False) -> Range:
    return Range(low, high, whole=False, open_low=open_low)


MOST_LAYERS = 1 << 12
LAYERS = Range(1, MOST_LAYERS)
LAYER_COUNT = Range(0, MOST_LAYERS)  # of some kind of layers: dense ones, drafts
WIDTH = Range(1, 1 << 20)
INNER = Range(1, 1 << 22)
HEADS = Range(1, 1 << 16)
HEAD_DIM = Range(1, 1 << 16)
EXPERTS = Range(1, 1 << 16)
SHARED_EXPERTS = Range(0, 1 << 10)
POSITIONS = Range(1, 1 << 24)
MOST_VOCABULARY = 1 << 24
VOCABULARY = Range(1, MOST_VOCABULARY)
MOST_ROUTED = 1 << 18  # experts of all layers together: DeepSeek-V3 has 14,848
ROPE_DIVISOR = _real(1e-6, 1e6)  # of one frequency
LIMIT = _real(0.0, 1e6)  # of what an activation gives; 0: none
LAYER_THETA = _real(0.0, 1e12)  # of one layer; 0: no rotary embedding
MOST_SLICE_ROWS = 1 << 24  # of a look-up table: their numbers travel as float32
MOST_TOKEN_IDS = 1 << 10  # in one field

RANGES: dict[str, Range] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_target_layers": LAYERS,
    "markov_rank": Range(0, 1 << 16),
    "n_layers": LAYERS,
    "num_layers": Range(1, MOST_LAYERS // 2),  # LongCat-Flash's, each of which is two
    "num_nextn_predict_layers": LAYER_COUNT,
    "mtp_num_hidden_layers": LAYER_COUNT,
    "first_k_dense_replace": LAYER_COUNT,
    "decoder_sparse_step": LAYERS,
    "interleave_moe_layer_step": LAYERS,
    "full_attention_interval": LAYERS,
    "global_attn_every_n_layers": LAYERS,
    "no_rope_layer_interval": LAYERS,
    "vocab_size": VOCABULARY,
    "emb_neighbor_num": Range(2, 8),  # with the ratio: hashes of n-grams stay below 2^63
    "emb_split_num": Range(1, 1 << 8),
    "ngram_vocab_size_ratio": _real(0.0, 1 << 12, open_low=True),
    "draft_vocab_size": VOCABULARY,
    "mask_token_id": Range(0, MOST_VOCABULARY - 1),
    "block_size": Range(2, 1 << 10),  # of a head that drafts a block at once
    "max_position_embeddings": POSITIONS,
    "original_max_position_embeddings": POSITIONS,
    "sliding_window": POSITIONS,
    "swa_window_size": POSITIONS,
    "sliding_window_pattern": LAYERS,
    "prefix_dense_sliding_window_pattern": LAYERS,
    "sliding_window_size": POSITIONS,
    "attention_chunk_size": POSITIONS,
    "index_topk": POSITIONS,
    "index_block_size": POSITIONS,
    "index_topk_blocks": POSITIONS,
    "index_local_blocks": POSITIONS,
    "index_topk_freq": LAYER_COUNT,
    "index_skip_topk_offset": LAYER_COUNT,
    "intermediate_size": INNER,
    "image_token_index": Range(0, MOST_VOCABULARY - 1),
    "image_token_id": Range(0, MOST_VOCABULARY - 1),
    "image_size": Range(1, 1 << 12),
    "patch_size": Range(1, 1 << 8),
    "depth": LAYERS,
    "spatial_merge_size": Range(1, 1 << 3),
    "temporal_patch_size": Range(1, 1 << 4),
    "num_position_embeddings": Range(1, 1 << 16),
    "out_hidden_size": WIDTH,
    "projector_input_dim": WIDTH,
    "projector_output_dim": WIDTH,
    "vision_output_dim": WIDTH,
    "moe_intermediate_size": INNER,
    "ffn_hidden_size": INNER,
    "expert_ffn_hidden_size": INNER,
    "intermediate_size_mlp": INNER,
    "dense_intermediate_size": INNER,
    "prefix_dense_intermediate_size": INNER,
    "shared_expert_intermediate_size": Range(0, 1 << 22),
    "share_expert_dim": Range(0, 1 << 22),
    "shared_intermediate_size": Range(0, 1 << 22),
    "moe_shared_expert_intermediate_size": INNER,
    "moe_latent_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "swa_num_key_value_heads": HEADS,
    "num_attention_groups": HEADS,
    "num_global_key_value_heads": HEADS,
    "index_n_heads": HEADS,
    "linear_num_value_heads": HEADS,
    "linear_num_key_heads": HEADS,
    "linear_num_heads": HEADS,
    "num_sliding_attention_heads": HEADS,
    "num_heads": HEADS,
    "mamba_n_heads": HEADS,
    "mamba_num_heads": HEADS,
    "mamba_n_groups": HEADS,
    "n_groups": HEADS,
    "mamba_expand": Range(1, 1 << 10),
    "head_dim": HEAD_DIM,
    "global_head_dim": HEAD_DIM,
    "rotary_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": Range(2, 1 << 16),
    "index_head_dim": HEAD_DIM,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "linear_head_dim": HEAD_DIM,
    "mamba_d_head": HEAD_DIM,
    "mamba_d_state": HEAD_DIM,
    "ssm_state_size": HEAD_DIM,
    "mamba_head_dim": HEAD_DIM,
    "mamba_d_conv": Range(1, 1 << 10),
    "conv_kernel": Range(1, 1 << 10),
    "short_conv_kernel_size": Range(1, 1 << 10),
    "layer_group_size": LAYERS,
    "kda_lower_bound": _real(-1e3, 0.0),
    "linear_conv_kernel_dim": Range(1, 1 << 10),
    "conv_L_cache": Range(1, 1 << 10),
    "share_q_dim": WIDTH,
    "q_lora_rank": Range(0, 1 << 20),  # 0 and null: queries come straight from the hidden row
    "kv_lora_rank": WIDTH,
    "n_routed_experts": EXPERTS,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "moe_k": EXPERTS,
    "moe_topk": EXPERTS,
    "num_experts_per_token": EXPERTS,
    "moe_top_k": EXPERTS,
    "zero_expert_num": Range(0, 1 << 16),
    "n_shared_experts": SHARED_EXPERTS,
    "moe_num_shared_experts": SHARED_EXPERTS,
    "moe_layer_start_index": LAYER_COUNT,
    "moe_layer_end_index": Range(-1, MOST_LAYERS),
    "moe_layer_interval": LAYERS,
    "max_window_layers": LAYER_COUNT,
    "floor_scale": POSITIONS,
    "n_group": EXPERTS,
    "topk_group": EXPERTS,
    "routed_scaling_factor": _real(1e-6, 1e6),
    "rms_norm_eps": _real(1e-20, 1.0),
    "rope_theta": _real(1.0, 1e12, open_low=True),
    "swa_rope_theta": _real(1.0, 1e12, open_low=True),
    "attention_value_scale": _real(1e-6, 1e3),
    "factor": _real(1e-3, 1e6),
    "alpha": _real(1e-3, 1e6),
    "low_freq_factor": _real(1e-3, 1e3),
    "high_freq_factor": _real(1e-3, 1e3),
    "partial_rotary_factor": _real(0.0, 1.0, open_low=True),
    "short_mscale": _real(1e-3, 1e3),
    "long_mscale": _real(1e-3, 1e3),
    "attention_multiplier": _real(1e-6, 1e3),
    "residual_multiplier": _real(1e-6, 1e3),
    "embedding_multiplier": _real(1e-6, 1e4),
    "input_embedding_scale": _real(1e-6, 1e4),
    "logit_scale": _real(1e-6, 1e4),
    "logits_scaling": _real(1e-6, 1e4),
    "final_logit_softcapping": _real(1e-3, 1e6),
    "clip_qkv": _real(1e-6, 1e6),
    "attn_scale": _real(0.0, 1e3),
    "llama_4_scaling_beta": _real(0.0, 1e3),
    "moe_norm_min": _real(0.0, 1.0),
    "moe_normalize_expert_weights": _real(1e-6, 1e3),
    "router_jitter_noise": _real(0.0, 0.5),
    "swiglu_alpha": _real(1e-6, 1e3),
    "swiglu_limit": _real(1e-6, 1e6),
    "beta_fast": _real(1e-3, 1e6),
    "beta_slow": _real(1e-3, 1e6),
    "attention_factor": _real(1e-3, 1e3),
    "mscale": _real(0.0, 1e3),
    "mscale_all_dim": _real(0.0, 1e3),
    "expert_bits": _real(0.0, 64.0, open_low=True),  # of a GGUF file's weights in memory
    "map_bits": _real(0.0, 64.0, open_low=True),
    "embedding_bits": _real(0.0, 64.0, open_low=True),
}
