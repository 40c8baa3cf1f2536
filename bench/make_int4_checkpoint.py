"""`python -m bench.make_int4_checkpoint`: a published shape as an INT4 checkpoint of random weights, written directly.

Routed experts are compressed-tensors' `pack-quantized` (W4A16): eight codes of 4 bits in an int32 word and a bfloat16
scale for each 128 inputs; all other tensors are bfloat16. One layer is in memory at a time, so a checkpoint may be
larger than the machine. The tokenizer is small: its ids are the first of the vocabulary.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench import make_checkpoint
from bench.make_checkpoint import COMMON, Config, Shape, matrix_spread, qwen3_moe, write_tokenizer

GROUP = 128
CODE_DEVIATION = (255 / 12) ** 0.5  # of sixteen codes that are all as likely
QUANTIZATION: Config = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": GROUP,
                "symmetric": True,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
}


def published(name: str, **changed: int) -> Shape:
    """A Qwen3-MoE of `configs/models`, with other numbers of layers or experts if any are named."""
    fields = make_checkpoint.published(name)
    config = {**COMMON, "mlp_only_layers": [], "torch_dtype": "bfloat16", **fields, **changed}
    return Shape({**config, "quantization_config": QUANTIZATION}, qwen3_moe)


SHAPES = {"qwen3-30b-a3b": published("qwen3-30b-a3b")}


def tensors(shape: Shape, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor, in the order of the layers."""
    random = torch.Generator().manual_seed(seed)
    for name, size in shape.sizes(shape.config):
        if len(size) == 1:
            yield name, torch.ones(size, dtype=torch.bfloat16)
        elif ".experts." in name:
            yield from _packed(
                name.removesuffix(".weight"), size, matrix_spread(name, size, shape.config), random
            )
        else:
            spread = matrix_spread(name, size, shape.config)
            yield name, torch.randn(size, generator=random).mul_(spread).bfloat16()


def _packed(
    stem: str, size: tuple[int, ...], spread: float, random: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """Random words are random codes; the scale makes their deviation `spread`."""
    outputs, inputs = size
    words = torch.empty(outputs * inputs // 16, dtype=torch.int64)
    words.random_(-(1 << 63), None, generator=random)
    yield f"{stem}.weight_packed", words.view(torch.int32).view(outputs, inputs // 8)
    yield f"{stem}.weight_scale", torch.full((outputs, inputs // GROUP), spread / CODE_DEVIATION).bfloat16()
    yield f"{stem}.weight_shape", torch.tensor(size)


def write(shape: Shape, folder: Path, *, seed: int = 0) -> int:
    """Config, a file for each layer and others for the rest, index, tokenizer; returns the bytes of all tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    total = 0
    for number, (_, part) in enumerate(groupby(tensors(shape, seed), key=lambda one: _layer(one[0]))):
        file, stored = f"model-{number:05d}.safetensors", dict(part)
        save_file(stored, str(folder / file), metadata={"format": "pt"})
        where |= dict.fromkeys(stored, file)
        total += sum(value.nbytes for value in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(shape.config, indent=2) + "\n")
    write_tokenizer(shape.config, folder)
    return total


def _layer(name: str) -> str:
    """`model.layers.7`, or what comes before and after the layers."""
    parts = name.split(".")
    return ".".join(parts[:3]) if "layers" in parts else parts[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write an INT4 checkpoint of random weights in a published shape."
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument("--experts", type=int, help="only so many experts in a layer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    asked = {"num_hidden_layers": options.layers, "num_experts": options.experts}
    shape = SHAPES[options.shape]
    changed = {name: value for name, value in asked.items() if value is not None}
    total = write(replace(shape, config=shape.config | changed), options.out, seed=options.seed)
    print(f"{options.shape}: {total / 2**30:.2f} GiB in {options.out}")


if __name__ == "__main__":
    main()
