"""From a GGUF file's metadata to the config.json that families read: one row for each architecture of llama.cpp.

Left are llama.cpp's keys without the architecture in front (`gguf-py/gguf/constants.py`), right the fields of Hugging
Face. What llama.cpp takes for granted of an architecture, and so stores nowhere, is in `fixed`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from afserve.errors import CheckpointError, shown
from afserve.gguf.header import TensorRow
from afserve.gguf.metadata import Metadata

Config = dict[str, object]
Tensors = Mapping[str, TensorRow]
_COMMON = {
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
}
_GROUPED = {"attention.head_count_kv": "num_key_value_heads"}
_DENSE = {"feed_forward_length": "intermediate_size"}
_INNER = {"expert_feed_forward_length": "moe_intermediate_size"}
_ROUTED = {"expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts", **_INNER}
_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
_SIGMOID = 2  # of `expert_gating_func`
_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """`keys` that a file has to have and those that it may have (`optional`). `more` adds what follows from several.

    `turned`: rows of queries and keys are stored with the halves of each head interleaved. `post_norm`: the norm before
    the FFN. `norms_more`: norms are stored with the one that the family adds to them.
    """

    model_type: str
    keys: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    more: Callable[[Metadata, Tensors, Config], None] = lambda metadata, tensors, config: None
    turned: bool = False
    post_norm: str = "ffn_norm"
    norms_more: bool = False


def config_of(metadata: Metadata, tensors: Tensors) -> Config:
    """Raises CheckpointError for an architecture that is not known, and for a key that is missing or not as it has to
    be; whether a number can be is the families' business."""
    known = architecture_named(metadata.architecture, metadata.where)
    config: Config = {"model_type": known.model_type, **known.fixed}
    for key, name in {**_COMMON, **known.keys}.items():
        config[name] = metadata.number(metadata.own(key))
    for key, name in known.optional.items():
        if metadata.has(metadata.own(key)):
            config[name] = metadata.number(metadata.own(key))
    config["vocab_size"] = _vocabulary(metadata, tensors)
    predicting = metadata.integer(metadata.own("nextn_predict_layers"), 0)
    layers = metadata.integer(metadata.own("block_count"))
    config["num_hidden_layers"] = layers - predicting
    if f"blk.{layers - 1}.nextn.eh_proj.weight" in tensors:
        config["num_nextn_predict_layers"] = predicting
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["rope_parameters"] = _rope(metadata)
    known.more(metadata, tensors, config)
    return config


def architecture_named(name: object, where: str) -> Architecture:
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(
            f"{where}: general.architecture {shown(name)} is not supported in GGUF files; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return found


def _vocabulary(metadata: Metadata, tensors: Tensors) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{metadata.where}: tensor token_embd.weight is missing, or no matrix")
    return embedding.shape[0]


def _rope(metadata: Metadata) -> Config:
    made: Config = {"rope_type": metadata.string(metadata.own("rope.scaling.type"), "none")}
    if metadata.has(theta := metadata.own("rope.freq_base")):
        made["rope_theta"] = float(metadata.number(theta))
    if made["rope_type"] == "none":
        made["rope_type"] = "default"
        return made
    made["factor"] = metadata.number(metadata.own("rope.scaling.factor"))
    if metadata.has(original := metadata.own("rope.scaling.original_context_length")):
        made["original_max_position_embeddings"] = metadata.integer(original)
    for key, name in _YARN.items():
        if metadata.has(own := metadata.own(key)):
            made[name] = metadata.number(own)
    return made


def _mixtral(metadata: Metadata, tensors: Tensors, config: Config) -> None:
    """Of the architecture that dense models of Meta have too."""
    if not config["num_local_experts"]:
        raise CheckpointError(
            f"{metadata.where}: the model has no experts; afserve serves Mixture-of-Experts models"
        )
    if "rope_freqs.weight" in tensors:
        raise CheckpointError(
            f"{metadata.where}: tensor rope_freqs.weight: factors of a rotary embedding are not read from GGUF files"
        )


def _shared_width(metadata: Metadata, tensors: Tensors, config: Config) -> None:
    """Files from before the key was written have the tensor alone."""
    shared = tensors.get("blk.0.ffn_up_shexp.weight")
    if shared is not None:
        config["shared_expert_intermediate_size"] = shared.shape[0]
    config["qkv_bias"] = config["attention_bias"]


def _partial(metadata: Metadata, tensors: Tensors, config: Config) -> None:
    """How much of a head the rotary embedding turns."""
    size, head = metadata.integer(metadata.own("rope.dimension_count")), config["head_dim"]
    config["rope_parameters"] = {**_rope(metadata), "partial_rotary_factor": size / max(1, int(str(head)))}
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    _router(metadata, config)


def _router(metadata: Metadata, config: Config) -> None:
    config["norm_topk_prob"] = metadata.is_set(metadata.own("expert_weights_norm"), False)
    if metadata.has(scale := metadata.own("expert_weights_scale")):
        config["routed_scaling_factor"] = metadata.number(scale) or 1.0


def _latent(metadata: Metadata, tensors: Tensors, config: Config) -> None:
    """Multi-head latent attention. DeepSeek-V2's router is softmax, that of V3 sigmoid with a bias."""
    rotary = metadata.integer(metadata.own("rope.dimension_count"))
    if not metadata.has(metadata.own("attention.key_length_mla")):
        key, value = (
            "attention.key_length",
            "attention.value_length",
        )  # from before latent attention was absorbed
    else:
        key, value = "attention.key_length_mla", "attention.value_length_mla"
    config["qk_rope_head_dim"] = rotary
    config["qk_nope_head_dim"] = metadata.integer(metadata.own(key)) - rotary
    config["v_head_dim"] = metadata.integer(metadata.own(value))
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["attention_bias"] = False
    _router(metadata, config)
    rope = config["rope_parameters"]
    if isinstance(rope, dict) and metadata.has(log := metadata.own("rope.scaling.yarn_log_multiplier")):
        rope.pop("attention_factor", None)
        rope["mscale"] = rope["mscale_all_dim"] = round(10 * metadata.number(log), 6)
    biased = any(name.endswith(".exp_probs_b.bias") for name in tensors)
    if biased or metadata.integer(metadata.own("expert_gating_func"), 1) == _SIGMOID:
        config["model_type"] = "deepseek_v3"
        return
    grouped = metadata.integer(metadata.own("expert_group_used_count"), 1) > 1
    config["topk_method"] = "group_limited_greedy" if grouped else "greedy"


def _delta(metadata: Metadata, tensors: Tensors, config: Config) -> None:
    """Three of four layers are gated delta nets; llama.cpp describes them by the words of state space models."""
    heads = metadata.integer(metadata.own("ssm.time_step_rank"))
    config["linear_value_head_dim"] = metadata.integer(metadata.own("ssm.inner_size")) // max(1, heads)
    recurrent = metadata.numbers(metadata.own("attention.recurrent_layers"))
    if recurrent:
        layers = int(str(config["num_hidden_layers"]))
        config["layer_types"] = [
            "linear_attention" if each else "full_attention" for each in recurrent[:layers]
        ]
    turned = metadata.integer(metadata.own("rope.dimension_count"))
    partial = turned / max(1, int(str(config["head_dim"])))
    config["rope_parameters"] = {**_rope(metadata), "partial_rotary_factor": partial}


def _gpt_oss(metadata: Metadata, tensors: Tensors, config: Config) -> None:
    """Its corrections of YaRN are not rounded to whole frequencies, which no key says."""
    rope = config["rope_parameters"]
    if isinstance(rope, dict) and rope["rope_type"] == "yarn":
        rope["truncate"] = False


ARCHITECTURES: dict[str, Architecture] = {
    "qwen3moe": Architecture(
        "qwen3_moe",
        {**_GROUPED, **_INNER, "expert_count": "num_experts", "attention.key_length": "head_dim"},
        _DENSE,
        {"norm_topk_prob": True},
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**_GROUPED, **_DENSE, **_INNER, "expert_count": "num_experts"},
        {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {"norm_topk_prob": False},
        _shared_width,
    ),
    "olmoe": Architecture(
        "olmoe",
        {**_GROUPED, **_DENSE, "expert_count": "num_experts"},
        fixed={"norm_topk_prob": False},
    ),
    "llama": Architecture(
        "mixtral",
        {**_GROUPED, **_DENSE},
        {"expert_count": "num_local_experts", "attention.key_length": "head_dim"},
        {"num_local_experts": 0},
        _mixtral,
        turned=True,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        {
            **_GROUPED,
            **_INNER,
            "attention.key_length": "head_dim",
            "expert_count": "num_experts",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.group_count": "linear_num_key_heads",
            "ssm.time_step_rank": "linear_num_value_heads",
        },
        {"full_attention_interval": "full_attention_interval"},
        more=_delta,
        post_norm="post_attention_norm",
        norms_more=True,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        {
            **_GROUPED,
            **_DENSE,
            **_ROUTED,
            "leading_dense_block_count": "first_k_dense_replace",
            "attention.key_length": "head_dim",
        },
        _GROUPS,
        more=_partial,
        post_norm="post_attention_norm",
    ),
    "dots1": Architecture(
        "dots1",
        {**_GROUPED, **_DENSE, **_ROUTED, "leading_dense_block_count": "first_k_dense_replace"},
        {**_GROUPS, "attention.key_length": "head_dim"},
        more=lambda metadata, tensors, config: _router(metadata, config),
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {
            **_GROUPED,
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "attention.key_length": "head_dim",
            "rope.dimension_count": "rotary_dim",
        },
    ),
    "deepseek2": Architecture(
        "deepseek_v2",
        {
            **_DENSE,
            **_ROUTED,
            "leading_dense_block_count": "first_k_dense_replace",
            "attention.kv_lora_rank": "kv_lora_rank",
        },
        {**_GROUPS, "attention.q_lora_rank": "q_lora_rank"},
        more=_latent,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            **_GROUPED,
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
            "attention.key_length": "head_dim",
        },
        more=_gpt_oss,
        post_norm="post_attention_norm",
    ),
}
"""llama.cpp's name -> row."""
