"""A checkpoint of `make_large_checkpoint` as one GGUF file, which llama.cpp reads too: the same numbers, and experts of
a layer in one tensor, as its own converter writes them. Written a tensor at a time, and left in no page cache."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFEndian, GGUFWriter, TokenType

from bench.make_checkpoint import Config

Numbers = Callable[[str, tuple[int, ...]], np.ndarray]  # of a tensor of the checkpoint: bfloat16 as uint16
_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
}
_WHOLE = ("norm", "gate_inp")  # names that end so are float32, as llama.cpp's converter has it
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_gguf(
    path: Path, c: Config, sizes: dict[str, tuple[int, ...]], numbers: Numbers, folder: Path
) -> int:
    """Bytes of all tensors. `folder` has the tokenizer."""
    writer = GGUFWriter(path, "qwen3moe", endianess=GGUFEndian.LITTLE)
    _add_metadata(writer, c)
    _add_tokenizer(writer, c, folder)
    tensors = list(_tensors(c))
    total = 0
    for name, parts in tensors:
        count, whole = int(np.prod(sizes[parts[0]])) * len(parts), name.endswith(_WHOLE)
        shape = (len(parts), *sizes[parts[0]]) if len(parts) > 1 else sizes[parts[0]]
        kind = GGMLQuantizationType.F32 if whole else GGMLQuantizationType.BF16
        item = np.dtype(np.float32 if whole else np.uint16)
        writer.add_tensor_info(f"{name}.weight", shape, item, count * item.itemsize, kind)
        total += count * item.itemsize
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, parts in tensors:
        made = np.concatenate([numbers(part, sizes[part]).reshape(-1) for part in parts])
        writer.write_tensor_data(
            (made.astype(np.uint32) << 16).view(np.float32) if name.endswith(_WHOLE) else made
        )
    writer.close()
    with path.open("rb+") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return total


def _tensors(c: Config) -> Iterator[tuple[str, list[str]]]:
    """Names in the file, and the tensors of the checkpoint that they are made of."""
    for name, stored in _ENDS.items():
        yield name, [f"{stored}.weight"]
    for layer in range(c["num_hidden_layers"]):
        stored = f"model.layers.{layer}"
        for name, rest in _NAMES.items():
            yield f"blk.{layer}.{name}", [f"{stored}.{rest}.weight"]
        for part in ("gate", "up", "down"):
            experts = (
                f"{stored}.mlp.experts.{expert}.{part}_proj.weight" for expert in range(c["num_experts"])
            )
            yield f"blk.{layer}.ffn_{part}_exps", list(experts)


def _add_metadata(writer: GGUFWriter, c: Config) -> None:
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["moe_intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_expert_count(c["num_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])


def _add_tokenizer(writer: GGUFWriter, c: Config, folder: Path) -> None:
    """Ids behind the tokenizer's own are unused ones."""
    said = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    named = {number: token for token, number in said["model"]["vocab"].items()}
    named |= {added["id"]: added["content"] for added in said["added_tokens"]}
    special = {added["id"] for added in said["added_tokens"]}
    tokens = [named.get(number, f"[PAD{number}]") for number in range(c["vocab_size"])]
    kinds = [
        TokenType.CONTROL if number in special else TokenType.NORMAL if number in named else TokenType.UNUSED
        for number in range(c["vocab_size"])
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = said["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_bos_token_id(c["bos_token_id"])
    writer.add_eos_token_id(c["eos_token_id"])
    writer.add_pad_token_id(c["pad_token_id"])
