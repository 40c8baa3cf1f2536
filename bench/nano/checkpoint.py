"""nano as a Hugging Face folder: DeepSeek-V3's tensor names, bfloat16 values, and back again.

Knows no training. The MTP module goes where DeepSeek puts it, under layer number `layers`, with its own
copies of the embedding and of the head.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.nano.model import Layer, Mlp, Moe, Nano
from bench.nano.shape import BEGIN, END, PAD, Shape

ATTENTION = (
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
)
MLP = ("gate_proj", "up_proj", "down_proj")


def views(model: Nano) -> Iterator[tuple[str, Tensor]]:
    """Every (checkpoint name, view into the model's storage)."""
    last = f"model.layers.{model.s.layers}"
    yield "model.embed_tokens.weight", model.embed.data
    yield "model.norm.weight", model.norm.data
    yield "lm_head.weight", model.head.data
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        yield from _layer(layer, f"model.layers.{index}")
    yield from _layer(model.mtp.layer, last)
    yield f"{last}.embed_tokens.weight", model.embed.data
    yield f"{last}.shared_head.head.weight", model.head.data
    yield f"{last}.shared_head.norm.weight", model.mtp.norm.data
    for name in ("enorm", "hnorm", "eh_proj"):
        yield f"{last}.{name}.weight", getattr(model.mtp, name).data


def _layer(layer: Layer, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", getattr(layer, name).data
    for name in ATTENTION:
        yield f"{prefix}.self_attn.{name}.weight", getattr(layer.self_attn, name).data
    if isinstance(layer.mlp, Moe):
        yield from _moe(layer.mlp, f"{prefix}.mlp")
    else:
        yield from _mlp(layer.mlp, f"{prefix}.mlp")


def _mlp(mlp: Mlp, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name in MLP:
        yield f"{prefix}.{name}.weight", getattr(mlp, name).data


def _moe(moe: Moe, prefix: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{prefix}.gate.weight", moe.gate.data
    yield f"{prefix}.gate.e_score_correction_bias", moe.bias
    for expert in range(moe.s.experts):
        gate, up = moe.gate_up.data[expert].chunk(2, 0)
        for name, part in zip(MLP, (gate, up, moe.down.data[expert]), strict=True):
            yield f"{prefix}.experts.{expert}.{name}.weight", part
    yield from _mlp(moe.shared_experts, f"{prefix}.shared_experts")


def save(model: Nano, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (the router bias stays float32)."""
    tensors = {
        name: view.detach()
        .to(torch.float32 if name.endswith("bias") else torch.bfloat16)
        .clone()
        .contiguous()
        for name, view in views(model)
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write(folder / "config.json", model.s.architecture())
    sampling = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD, "do_sample": True}
    _write(folder / "generation_config.json", {**sampling, "temperature": 0.7, "top_p": 0.95})


def _write(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def load(folder: Path) -> Nano:
    """The saved model in float32."""
    model = Nano(Shape.read(json.loads((folder / "config.json").read_text())))
    tensors = load_file(str(folder / "model.safetensors"))
    with torch.no_grad():
        for name, view in views(model):
            view.copy_(tensors[name])
    return model
