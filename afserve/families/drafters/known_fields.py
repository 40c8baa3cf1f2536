"""Fields of heads' config.json: those of decoder layers that are read, and those that change nothing. A head with any
other field is refused by its name, since it may ask for what is not computed."""

from collections.abc import Collection

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import given

OF_LAYERS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "hidden_act", "mlp_bias", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "rms_norm_eps", "layer_types",
    "max_position_embeddings", "original_max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "rotary_dim", "is_neox_style", "is_causal", "use_sliding_window", "sliding_window",
    "max_window_layers",
)  # fmt: skip
_OF_NO_WEIGHT = (  # a head says the same with any value of these
    # names, types, and what loads a folder
    "architectures", "auto_map", "custom_pipelines", "name_or_path", "_name_or_path", "dtype", "torch_dtype",
    "transformers_version", "speculators_version", "speculators_config", "has_no_defaults_at_init",
    "task_specific_params", "finetuning_task", "problem_type", "tokenizer_class", "prefix", "modal_type",
    "target_model_type", "pretraining_tp", "torchscript", "use_bfloat16", "tf_legacy_loss", "pruned_heads",
    "attn_implementation", "_attn_implementation_autoset",
    # of training
    "attention_dropout", "initializer_range", "embed_requires_grad", "max_anchors", "gradient_checkpointing",
    # of what is around the layers, which tensors tell or the model has
    "tie_word_embeddings", "tie_encoder_decoder", "is_decoder", "is_encoder_decoder", "chunk_size_feed_forward",
    "has_lm_head", "id2label", "label2id", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
    "decoder_start_token_id",
    # of transformers' generation
    "use_cache", "return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states",
    "output_scores", "do_sample", "temperature", "top_k", "top_p", "typical_p", "min_length", "max_length",
    "num_beams", "num_beam_groups", "num_return_sequences", "early_stopping", "length_penalty",
    "diversity_penalty", "repetition_penalty", "exponential_decay_length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id",
    "suppress_tokens", "begin_suppress_tokens", "remove_invalid_values",
)  # fmt: skip


def check_names(fields: ConfigFields, *read: Collection[str]) -> None:
    """Raises CheckpointError for a field that is in none of `read`, nor known to change nothing."""
    known = {"add_cross_attention", *(name for names in read for name in names)}
    fields.known_only("add_cross_attention", False)
    for name in given(fields.config):
        if name not in known and name not in _OF_NO_WEIGHT:
            raise fields.refuse(
                name,
                "is not supported: it is neither read nor known to change nothing; take it out where the head guesses "
                "the same without it",
            )
