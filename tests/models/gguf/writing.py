"""Writes GGUF files as llama.cpp's converter does: Hugging Face folders with metadata, names and orders of llama.cpp.

It shares nothing with what reads them. Tensors are stored as they are, or as `as_bytes` has them in another type.
"""

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

ALIGNMENT = 32
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
Stored = tuple[int, tuple[int, ...], bytes]
"""ggml's number of the type, the shape as torch has it, and the bytes."""

_RENAMED = (
    (r"^model\.embed_tokens\.", "token_embd."),
    (r"^model\.norm\.", "output_norm."),
    (r"^lm_head\.", "output."),
    (r"^model\.layers\.(\d+)\.", r"blk.\1."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.self_attn\.([qkv])_proj\.", r".attn_\1."),
    (r"\.self_attn\.o_proj\.", ".attn_output."),
    (r"\.self_attn\.([qk])_norm\.", r".attn_\1_norm."),
    (r"\.self_attn\.sinks$", ".attn_sinks.weight"),
    (r"\.self_attn\.q_([ab])_proj\.", r".attn_q_\1."),
    (r"\.self_attn\.(q|kv)_a_layernorm\.", r".attn_\1_a_norm."),
    (r"\.self_attn\.kv_a_proj_with_mqa\.", ".attn_kv_a_mqa."),
    (r"\.(mlp|block_sparse_moe)\.(gate|router)\.(weight|bias)$", r".ffn_gate_inp.\3"),
    (r"\.(mlp\.gate|block_sparse_moe)\.e_score_correction_bias$", ".exp_probs_b.bias"),
    (r"\.mlp\.shared_experts?\.(gate|up|down)_proj\.", r".ffn_\1_shexp."),
    (r"\.mlp\.shared_expert_gate\.", ".ffn_gate_inp_shexp."),
    (r"\.mlp\.(gate|up|down)_proj\.", r".ffn_\1."),
    (r"\.linear_attn\.in_proj_qkv\.", ".attn_qkv."),
    (r"\.linear_attn\.in_proj_z\.", ".attn_gate."),
    (r"\.linear_attn\.in_proj_b\.", ".ssm_beta."),
    (r"\.linear_attn\.in_proj_a\.", ".ssm_alpha."),
    (r"\.linear_attn\.(conv1d|norm)\.", r".ssm_\1."),
    (r"\.linear_attn\.out_proj\.", ".ssm_out."),
    (r"\.linear_attn\.A_log$", ".ssm_a"),
    (r"\.linear_attn\.dt_bias$", ".ssm_dt.bias"),
    (r"\.(eh_proj|enorm|hnorm|embed_tokens)\.weight$", r".nextn.\1.weight"),
    (r"\.shared_head\.(norm|head)\.", r".nextn.shared_head_\1."),
)
_EXPERT = re.compile(r"(.+\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_PARTS = {"w1": "gate", "w2": "down", "w3": "up", **{f"{p}_proj": p for p in ("gate", "up", "down")}}


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> bytes:
    """A value of the metadata with its type in front."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Iq", 11, value) if value < 0 else struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    kind, form = (6, "f") if value and isinstance(value[0], float) else (5, "i")
    return struct.pack("<IIQ", 9, kind, len(value)) + struct.pack(f"<{len(value)}{form}", *value)


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], version: int = 3) -> Path:
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    head += [text(key) + typed(value) for key, value in metadata.items()]
    align, at, data = metadata.get("general.alignment", ALIGNMENT), 0, []
    for name, (number, shape, raw) in tensors.items():
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head.append(text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", number, at))
        padded = raw + bytes(-len(raw) % align)
        data.append(padded)
        at += len(padded)
    whole = b"".join(head)
    path.write_bytes(whole + bytes(-len(whole) % align) + b"".join(data))
    return path


def stored(x: torch.Tensor) -> Stored:
    raw = x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return NUMBERS[x.dtype], tuple(x.shape), raw


def renamed(folder: Path) -> dict[str, torch.Tensor]:
    """A folder's tensors by llama.cpp's names, in llama.cpp's order of rows."""
    config = json.loads((folder / "config.json").read_text())
    made: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, x in load_file(folder / "model.safetensors").items():
        match = _EXPERT.fullmatch(name)
        if match:
            stem = _plain(match[1], config)
            experts.setdefault(f"{stem}ffn_{_EXPERT_PARTS[match[3]]}_exps.weight", {})[int(match[2])] = x
        elif ".mlp.experts." in name:
            made |= _of_gpt_oss(_plain(name.split("mlp.experts.")[0], config), name, x)
        elif name.endswith("kv_b_proj.weight"):
            made |= _latent(_plain(name.split("self_attn.")[0], config), x, config)
        else:
            made[_plain(name, config)] = _permuted(name, x, config)
    return made | {name: torch.stack([one[e] for e in range(len(one))]) for name, one in experts.items()}


def _plain(name: str, config: Mapping[str, Any]) -> str:
    late = ("gpt_oss", "glm4_moe", "qwen3_5_moe_text")
    after = "post_attention_norm" if config["model_type"] in late else "ffn_norm"
    for pattern, to in (*_RENAMED, (r"\.post_attention_layernorm\.", f".{after}.")):
        name = re.sub(pattern, to, name)
    return name


def _permuted(name: str, x: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    if name.endswith("shared_expert_gate.weight"):
        return x[0]
    if config["model_type"] == "qwen3_5_moe_text":
        return _tiled(name, x, config)
    heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}
    match = re.search(r"self_attn\.([qk])_proj\.", name)
    if config["model_type"] != "mixtral" or match is None:
        return x
    count = config[heads[match[1]]]
    return x.reshape(count, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _tiled(name: str, x: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Norms with their one; of value heads the first one of every key head, then the second ones."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return x + 1
    if ".linear_attn." not in name or name.endswith("norm.weight"):
        return x
    if name.endswith("out_proj.weight"):
        return x.unflatten(1, (keys, values // keys, -1)).transpose(1, 2).flatten(1)
    x = -x.exp() if name.endswith("A_log") else x[:, 0] if "conv1d" in name else x
    first = 2 * keys * config["linear_key_head_dim"] if "conv1d" in name or "in_proj_qkv" in name else 0
    rest = x[first:].unflatten(0, (keys, values // keys, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat((x[:first], rest))


def _of_gpt_oss(stem: str, name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    end = "bias" if name.endswith("_bias") else "weight"
    x = x if end == "bias" else x.transpose(1, 2)
    if "down_proj" in name:
        return {f"{stem}ffn_down_exps.{end}": x}
    return {f"{stem}ffn_gate_exps.{end}": x[:, ::2], f"{stem}ffn_up_exps.{end}": x[:, 1::2]}


def _latent(stem: str, x: torch.Tensor, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    k_b, v_b = x.view(config["num_attention_heads"], nope + value, -1).split([nope, value], 1)
    return {f"{stem}attn_k_b.weight": k_b.transpose(1, 2), f"{stem}attn_v_b.weight": v_b}


def described(folder: Path, *, predictors: bool = False) -> dict[str, Any]:
    """The metadata of a folder's config.json, without a tokenizer. `predictors`: its layers of multi-token prediction
    are in the file too."""
    c = json.loads((folder / "config.json").read_text())
    name = {
        "qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "olmoe": "olmoe", "mixtral": "llama", "gpt_oss": "gpt-oss",
        "glm4_moe": "glm4moe", "dots1": "dots1", "minimax_m2": "minimax-m2",
        "qwen3_5_moe_text": "qwen35moe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    }[c["model_type"]]  # fmt: skip
    rope = c.get("rope_parameters") or {"rope_theta": c["rope_theta"], "rope_type": "default"}
    predicting = c.get("num_nextn_predict_layers", 0) if predictors else 0
    latent = c.get("kv_lora_rank")
    head = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    own: dict[str, Any] = {
        "block_count": c["num_hidden_layers"] + predicting,
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c.get("intermediate_size", 0),
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": 1 if latent else c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.freq_base": rope["rope_theta"],
        "expert_count": c.get("n_routed_experts") or c.get("num_local_experts") or c["num_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": c.get("moe_intermediate_size") or c["intermediate_size"],
        "attention.key_length": latent + c["qk_rope_head_dim"] if latent else head,
        "attention.value_length": latent or head,
    }
    if latent:
        own |= {
            "attention.kv_lora_rank": latent,
            "attention.key_length_mla": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
            "attention.value_length_mla": c["v_head_dim"],
            "rope.dimension_count": c["qk_rope_head_dim"],
        }
        if c.get("q_lora_rank"):
            own["attention.q_lora_rank"] = c["q_lora_rank"]
    if rope["rope_type"] == "yarn":
        own |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
            "rope.scaling.yarn_beta_slow": float(rope["beta_slow"]),
        }
        if "mscale_all_dim" in rope:
            own["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if "n_routed_experts" in c:
        own |= {
            "leading_dense_block_count": c["first_k_dense_replace"],
            "expert_shared_count": c["n_shared_experts"],
            "expert_weights_norm": bool(c["norm_topk_prob"]),
            "expert_weights_scale": float(c["routed_scaling_factor"]),
            "expert_gating_func": 1 if c["model_type"] == "deepseek_v2" else 2,
        }
        if c.get("n_group"):
            own |= {"expert_group_count": c["n_group"], "expert_group_used_count": c["topk_group"]}
    if predicting:
        own["nextn_predict_layers"] = predicting
    if name == "minimax-m2":
        own |= {"rope.dimension_count": c["rotary_dim"], "expert_gating_func": 2}
    if name == "glm4moe":
        own["rope.dimension_count"] = int(head * rope["partial_rotary_factor"])
    if name == "qwen35moe":
        own |= {
            "rope.dimension_count": int(head * rope["partial_rotary_factor"]),
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": c["linear_conv_kernel_dim"],
            "ssm.state_size": c["linear_key_head_dim"],
            "ssm.group_count": c["linear_num_key_heads"],
            "ssm.time_step_rank": c["linear_num_value_heads"],
            "ssm.inner_size": c["linear_value_head_dim"] * c["linear_num_value_heads"],
            "attention.recurrent_layers": [int(kind == "linear_attention") for kind in c["layer_types"]],
        }
    if name in ("qwen2moe", "qwen35moe"):
        own["expert_shared_feed_forward_length"] = c["shared_expert_intermediate_size"]
    if name == "gpt-oss":
        own["attention.sliding_window"] = c["sliding_window"]
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in own.items()}}


def letters(size: int) -> dict[str, Any]:
    """A vocabulary of bytes and a few merges, filled up to `size` with tokens that are not used."""
    from afserve.tokens.tokenizer import BYTE_OF

    pairs = [("t", "h"), ("th", "e"), ("a", "n")]
    tokens = [*[*BYTE_OF][: size - 8], *("".join(pair) for pair in pairs)]
    unused = [f"[PAD{at}]" for at in range(len(tokens), size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *unused],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [5] * len(unused),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
    }


def convert(
    folder: Path,
    path: Path,
    store: Callable[[str, torch.Tensor], Stored] = lambda name, x: stored(x),
    **more: Any,
) -> Path:
    """A Hugging Face folder as one GGUF file."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    metadata = {**described(folder), **letters(size), **more}
    return write(path, metadata, {name: store(name, x) for name, x in renamed(folder).items()})


def q8_0(x: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Blocks of 32 codes of 8 bits behind a float16 scale, and the numbers that they stand for."""
    block = x.float().numpy().reshape(-1, 32)
    scale = (np.abs(block).max(1, keepdims=True) / 127).astype(np.float16)
    code = np.round(block / np.where(scale == 0, 1, scale).astype(np.float32)).clip(-127, 127).astype(np.int8)
    raw = np.concatenate((scale.view(np.uint8), code.view(np.uint8)), 1)
    return (8, tuple(x.shape), raw.tobytes()), _values(x, code, scale)


def q4_0(x: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """The same of 4 bits: code j and code j + 16 share a byte."""
    block = x.float().numpy().reshape(-1, 32)
    scale = (np.abs(block).max(1, keepdims=True) / 7).astype(np.float16)
    code = np.round(block / np.where(scale == 0, 1, scale).astype(np.float32)).clip(-8, 7).astype(np.int8)
    nibble = (code + 8).astype(np.uint8)
    raw = np.concatenate((scale.view(np.uint8), nibble[:, :16] | nibble[:, 16:] << 4), 1)
    return (2, tuple(x.shape), raw.tobytes()), _values(x, code, scale)


def _values(x: torch.Tensor, code: np.ndarray, scale: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(code * scale.astype(np.float32)).view(x.shape)


def mxfp4(x: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Blocks of 32 four-bit floats behind an exponent."""
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    block = x.float().numpy().reshape(-1, 32)
    power = np.floor(np.log2(np.abs(block).max(1, keepdims=True).clip(1e-30))) - 2
    part = np.abs(block) / np.exp2(power)
    near = np.abs(part[..., None] - magnitude).argmin(-1)
    values = np.sign(block) * magnitude[near] * np.exp2(power)
    code = (near | (block < 0) * 8).astype(np.uint8)
    raw = np.concatenate(((power + 127).astype(np.uint8), code[:, :16] | code[:, 16:] << 4), 1)
    return (39, tuple(x.shape), raw.tobytes()), torch.from_numpy(values.astype(np.float32)).view(x.shape)
