"""A checkpoint larger than memory, written at the speed of the disk: Qwen3-30B-A3B's layers, as many as are asked for.

    python -m bench.make_large_checkpoint --out DIR --layers 48     # 58 GB
    python -m bench.make_large_checkpoint --out TWIN --layers 4     # the same numbers in the first four layers
    python -m bench.make_large_checkpoint --out DIR --gguf          # the same as one GGUF file: DIR/model.gguf

Weights are pieces of one block of normal bfloat16 numbers, each tensor from a place of its own, so that no two experts
are alike and nothing is drawn twice. Layer i has the same numbers whatever the number of layers.
"""

import argparse
import json
import os
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from bench.large_gguf import write_gguf
from bench.make_checkpoint import QWEN3_MOE, Config, qwen3_moe, write_tokenizer

_POOL = 1 << 27  # numbers
_DEVIATION = 2048**-0.5
_NORMS = ("norm.weight", "layernorm.weight")
Named = list[tuple[str, tuple[int, ...]]]


def config(layers: int) -> Config:
    return QWEN3_MOE | {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
    }


def write_checkpoint(folder: Path, layers: int, *, gguf: bool = False) -> int:
    """Bytes of all tensors. Parts of it stay in no page cache."""
    folder.mkdir(parents=True, exist_ok=True)
    c = config(layers)
    write_tokenizer(c, folder)
    pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(1)).mul_(_DEVIATION).bfloat16()
    if gguf:

        def numbers(name: str, size: tuple[int, ...]) -> np.ndarray:
            return _numbers(name, int(torch.Size(size).numel()), pool).view(torch.uint16).numpy()

        return write_gguf(folder / "model.gguf", c, dict(qwen3_moe(c)), numbers, folder)
    (folder / "config.json").write_text(json.dumps(c, indent=1))
    files: dict[str, Named] = {}
    for name, size in qwen3_moe(c):
        layer = name.split(".")[2] if name.startswith("model.layers.") else "ends"
        files.setdefault(f"model-{layer}.safetensors", []).append((name, size))
    written = sum(_write_file(folder / file, named, pool) for file, named in files.items())
    where = {name: file for file, named in files.items() for name, _ in named}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return written


def _write_file(path: Path, named: Named, pool: torch.Tensor) -> int:
    header, at = {}, 0
    for name, size in named:
        count = int(torch.Size(size).numel())
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": (at, at + 2 * count)}
        at += 2 * count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in named:
            file.write(_numbers(name, int(torch.Size(size).numel()), pool).view(torch.uint8).numpy().data)
        file.flush()
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return at


def _numbers(name: str, count: int, pool: torch.Tensor) -> torch.Tensor:
    if name.endswith(_NORMS):
        return torch.ones(count, dtype=torch.bfloat16)
    first = int.from_bytes(sha256(name.encode()).digest()[:6], "little") % (len(pool) - count)
    return pool[first : first + count]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a random checkpoint that is larger than memory.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--gguf", action="store_true", help="one GGUF file in place of safetensors")
    asked = parser.parse_args()
    print(f"{write_checkpoint(asked.out, asked.layers, gguf=asked.gguf) / 1e9:.1f} GB in {asked.out}")


if __name__ == "__main__":
    main()
