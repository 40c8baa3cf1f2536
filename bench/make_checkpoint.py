"""`python -m bench.make_checkpoint`: random checkpoints of the shapes that are measured, as Hugging Face folders.

Knows tensor names and sizes, no engine. Values are bfloat16, normal with standard deviation 1 / sqrt(inputs), so that
logits are neither flat nor one spike; the tokenizer is a real byte-level BPE of the shape's vocabulary.
"""

import argparse
import json
import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.nano import corpus, tokenizer
from bench.nano.shape import BEGIN, END, PAD

MX_GROUP, MX_BIAS = 32, 127
E2M1_DEVIATION = 2.93  # of the sixteen four-bit floats, all as likely
MODELS = Path(__file__).parents[1] / "configs/models"
Config = dict[str, Any]
Sizes = Iterator[tuple[str, tuple[int, ...]]]


def published(name: str) -> Config:
    """The config.json that `configs/models` has of a published model."""
    fields: Config = tomllib.loads((MODELS / f"{name}.toml").read_text())["config"]
    return fields


COMMON: Config = {
    "attention_bias": False,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "hidden_act": "silu",
    "hidden_size": 512,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
}

QWEN3_MOE: Config = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 64,
    "intermediate_size": 1024,
    "mlp_only_layers": [],
    "num_experts": 32,
    "num_key_value_heads": 2,
}

THIN: Config = {  # what a layer costs beside its weights
    **QWEN3_MOE,
    "hidden_size": 384,
    "moe_intermediate_size": 192,
    "num_attention_heads": 6,
    "num_experts": 40,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 20,
    "num_key_value_heads": 1,
}

SMALL_EXPERTS: Config = {
    **THIN,
    "moe_intermediate_size": 96,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 12,
}

DEEPSEEK_V3: Config = {
    **COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 0,
    "intermediate_size": 1024,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 192,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 64,
}

QWEN3_NEXT: Config = {
    **QWEN3_MOE,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 256,
}

GPT_OSS: Config = {
    **COMMON,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "intermediate_size": 256,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "num_key_value_heads": 2,
    "num_local_experts": 32,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    },
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}

OLMOE: Config = {
    **{name: COMMON[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype")},
    **published("olmoe-1b-7b"),
}


def qwen3_moe(c: Config) -> Sizes:
    """Names and sizes of a Qwen3-MoE checkpoint."""
    yield from _ends(c)
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        yield from _norms(c, p)
        yield from _attention(c, f"{p}.self_attn")
        yield f"{p}.mlp.gate.weight", (c["num_experts"], c["hidden_size"])
        yield from _experts(c, p, c["num_experts"])


def olmoe(c: Config) -> Sizes:
    """Names and sizes of an OLMoE checkpoint: heads of hidden / heads numbers, norms over all of them."""
    hidden = c["hidden_size"]
    yield from _ends(c)
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        yield from _norms(c, p)
        kv = hidden * c["num_key_value_heads"] // c["num_attention_heads"]
        for part, outputs in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            yield f"{p}.self_attn.{part}_proj.weight", (outputs, hidden)
        yield f"{p}.self_attn.q_norm.weight", (hidden,)
        yield f"{p}.self_attn.k_norm.weight", (kv,)
        yield f"{p}.mlp.gate.weight", (c["num_experts"], hidden)
        for expert in range(c["num_experts"]):
            yield from _mlp(hidden, c["intermediate_size"], f"{p}.mlp.experts.{expert}")


def qwen3_next(c: Config) -> Sizes:
    """Names and sizes of a Qwen3-Next checkpoint."""
    hidden = c["hidden_size"]
    yield from _ends(c)
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        yield from _norms(c, p)
        if (layer + 1) % c["full_attention_interval"]:
            yield from _delta_net(c, f"{p}.linear_attn")
        else:
            yield from _attention(c, f"{p}.self_attn", gated=True)
        yield f"{p}.mlp.gate.weight", (c["num_experts"], hidden)
        yield from _experts(c, p, c["num_experts"])
        yield from _mlp(hidden, c["shared_expert_intermediate_size"], f"{p}.mlp.shared_expert")
        yield f"{p}.mlp.shared_expert_gate.weight", (1, hidden)


def _attention(c: Config, prefix: str, *, gated: bool = False) -> Sizes:
    """Grouped queries with norms of heads; `gated`: a gate for each query beside it."""
    hidden, head = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    yield f"{prefix}.q_proj.weight", (2 * q if gated else q, hidden)
    yield f"{prefix}.k_proj.weight", (kv, hidden)
    yield f"{prefix}.v_proj.weight", (kv, hidden)
    yield f"{prefix}.o_proj.weight", (hidden, q)
    yield f"{prefix}.q_norm.weight", (head,)
    yield f"{prefix}.k_norm.weight", (head,)


def _delta_net(c: Config, prefix: str) -> Sizes:
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    yield f"{prefix}.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden)
    yield f"{prefix}.in_proj_ba.weight", (2 * heads, hidden)
    yield f"{prefix}.conv1d.weight", (2 * keys + values, 1, c["linear_conv_kernel_dim"])
    yield f"{prefix}.A_log", (heads,)
    yield f"{prefix}.dt_bias", (heads,)
    yield f"{prefix}.norm.weight", (c["linear_value_head_dim"],)
    yield f"{prefix}.out_proj.weight", (hidden, values)


def deepseek_v3(c: Config) -> Sizes:
    """Names and sizes of a DeepSeek-V3 checkpoint without an MTP module."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    rank, queries = c["kv_lora_rank"], c["q_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    yield from _ends(c)
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        yield from _norms(c, p)
        yield f"{p}.self_attn.q_a_proj.weight", (queries, hidden)
        yield f"{p}.self_attn.q_a_layernorm.weight", (queries,)
        yield f"{p}.self_attn.q_b_proj.weight", (heads * (nope + rope), queries)
        yield f"{p}.self_attn.kv_a_proj_with_mqa.weight", (rank + rope, hidden)
        yield f"{p}.self_attn.kv_a_layernorm.weight", (rank,)
        yield f"{p}.self_attn.kv_b_proj.weight", (heads * (nope + value), rank)
        yield f"{p}.self_attn.o_proj.weight", (hidden, heads * value)
        if layer < c["first_k_dense_replace"]:
            yield from _mlp(hidden, c["intermediate_size"], f"{p}.mlp")
            continue
        yield f"{p}.mlp.gate.weight", (c["n_routed_experts"], hidden)
        yield f"{p}.mlp.gate.e_score_correction_bias", (c["n_routed_experts"],)
        yield from _experts(c, p, c["n_routed_experts"])
        shared = c["n_shared_experts"] * c["moe_intermediate_size"]
        yield from _mlp(hidden, shared, f"{p}.mlp.shared_experts")


def gpt_oss(c: Config) -> Sizes:
    """Names and sizes of a gpt-oss checkpoint with experts in MXFP4: bytes of two codes, and exponents."""
    hidden, inner, experts, head = (
        c["hidden_size"],
        c["intermediate_size"],
        c["num_local_experts"],
        c["head_dim"],
    )
    heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
    yield from _ends(c)
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        yield from _norms(c, p)
        yield f"{p}.self_attn.sinks", (heads,)
        for part, width in (("q", heads), ("k", groups), ("v", groups)):
            yield f"{p}.self_attn.{part}_proj.weight", (width * head, hidden)
            yield f"{p}.self_attn.{part}_proj.bias", (width * head,)
        yield f"{p}.self_attn.o_proj.weight", (hidden, heads * head)
        yield f"{p}.self_attn.o_proj.bias", (hidden,)
        yield f"{p}.mlp.router.weight", (experts, hidden)
        yield f"{p}.mlp.router.bias", (experts,)
        for part, outputs, inputs in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            yield f"{p}.mlp.experts.{part}_proj_blocks", (experts, outputs, inputs // MX_GROUP, MX_GROUP // 2)
            yield f"{p}.mlp.experts.{part}_proj_scales", (experts, outputs, inputs // MX_GROUP)
            yield f"{p}.mlp.experts.{part}_proj_bias", (experts, outputs)


def _ends(c: Config) -> Sizes:
    yield "model.embed_tokens.weight", (c["vocab_size"], c["hidden_size"])
    yield "model.norm.weight", (c["hidden_size"],)
    yield "lm_head.weight", (c["vocab_size"], c["hidden_size"])


def _norms(c: Config, prefix: str) -> Sizes:
    yield f"{prefix}.input_layernorm.weight", (c["hidden_size"],)
    yield f"{prefix}.post_attention_layernorm.weight", (c["hidden_size"],)


def _experts(c: Config, prefix: str, count: int) -> Sizes:
    for expert in range(count):
        yield from _mlp(c["hidden_size"], c["moe_intermediate_size"], f"{prefix}.mlp.experts.{expert}")


def _mlp(hidden: int, inner: int, prefix: str) -> Sizes:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


@dataclass(frozen=True, slots=True)
class Shape:
    config: Config
    sizes: Callable[[Config], Sizes]


SHAPES = {
    "qwen3-moe-110m": Shape(QWEN3_MOE, qwen3_moe),
    "thin-187m": Shape(THIN, qwen3_moe),
    "small-experts-178m": Shape(SMALL_EXPERTS, qwen3_moe),
    "deepseek-v3-119m": Shape(DEEPSEEK_V3, deepseek_v3),
    "qwen3-next-123m": Shape(QWEN3_NEXT, qwen3_next),
    "gpt-oss-111m": Shape(GPT_OSS, gpt_oss),
    "olmoe-1b-7b": Shape(OLMOE, olmoe),
}


def tensors(shape: Shape, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every named tensor: norms one (Qwen3-Next's are stored less one), biases a small float32 spread, matrices normal
    in bfloat16."""
    random = torch.Generator().manual_seed(seed)
    for name, size in shape.sizes(shape.config):
        if name.endswith("bias"):
            yield name, torch.randn(size, generator=random) * 0.02
        elif name.endswith("_blocks"):
            yield name, torch.randint(0, 256, size, generator=random, dtype=torch.uint8)
        elif name.endswith("_scales"):
            spread = matrix_spread(name, (1, size[-1] * MX_GROUP), shape.config) / E2M1_DEVIATION
            yield name, torch.full(size, MX_BIAS + round(math.log2(spread)), dtype=torch.uint8)
        elif name.endswith("A_log"):
            yield (
                name,
                (torch.rand(size, generator=random) * 6 - 5).bfloat16(),
            )  # a token leaves 0.1 to 0.99 of a state
        elif len(size) == 1:
            less_one = shape.config["model_type"] == "qwen3_next" and "linear_attn" not in name
            yield name, torch.full(size, 0.0 if less_one else 1.0, dtype=torch.bfloat16)
        else:
            spread = matrix_spread(name, size, shape.config)
            yield name, (torch.randn(size, generator=random) * spread).bfloat16()


def matrix_spread(name: str, size: tuple[int, ...], c: Config) -> float:
    """Standard deviation of a matrix; what adds to the residual stream is smaller the more layers there are."""
    spread = 1.0 if "embed_tokens" in name else math.prod(size[1:]) ** -0.5
    residual = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj_scales"))
    return spread / math.sqrt(2 * c["num_hidden_layers"]) if residual else spread


def write(shape: Shape, folder: Path, *, seed: int = 0, shards: int = 1) -> int:
    """Write config, weights (with an index when sharded) and tokenizer; returns the number of parameters.

    One shard is in memory at a time, so a checkpoint of many may be larger than the machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(shape, folder, seed, shards)
    (folder / "config.json").write_text(json.dumps(shape.config, indent=2) + "\n")
    write_tokenizer(shape.config, folder)
    return sum(parameters(name, size) for name, size in shape.sizes(shape.config))


def parameters(name: str, size: tuple[int, ...]) -> int:
    """Of a tensor; a byte of MXFP4 has two, a scale is none."""
    return 0 if name.endswith("_scales") else math.prod(size) * (2 if name.endswith("_blocks") else 1)


def write_tokenizer(c: Config, folder: Path) -> None:
    """Of so many ids as config has in its vocabulary, up to those of the small shapes; with the file that says which
    end a text."""
    ids = {key: c[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    texts = (doc.text for doc in corpus.documents() if "test" not in doc.path)
    size = min(c["vocab_size"], COMMON["vocab_size"])
    tokenizer.save(tokenizer.build(texts, size), folder, c["max_position_embeddings"])


def _write_weights(shape: Shape, folder: Path, seed: int, shards: int) -> None:
    made = tensors(shape, seed)
    if shards == 1:
        save_file(dict(made), str(folder / "model.safetensors"), metadata={"format": "pt"})
        return
    names = sum(1 for _ in shape.sizes(shape.config))
    where: dict[str, str] = {}
    total = 0
    for shard in range(shards):
        part = dict(islice(made, -(-names // shards)))
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, str(folder / file), metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
        total += sum(value.nbytes for value in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a random checkpoint of a measured shape.")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-moe-110m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    options = parser.parse_args()
    count = write(SHAPES[options.shape], options.out, seed=options.seed, shards=options.shards)
    stored = sum(file.stat().st_size for file in options.out.glob("*.safetensors"))
    print(f"{options.shape}: {count / 1e6:.1f} M parameters, {stored / 2**20:.0f} MiB in {options.out}")


if __name__ == "__main__":
    main()
