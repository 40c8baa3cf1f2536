"""`python -m bench.kv_dtype [--save]`: decode attention over long contexts, the KV cache in 8 bits beside bfloat16.

What is timed is the op that all attention halves call, over caches larger than the processor's; each round asks every
dtype in turn, and ratios are by round. Shapes are heads / key heads of a size, or latents. At 16k tokens
the aim is 1.4.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from afserve.kernels.cache import LayerShape
from afserve.kernels.formats.eight_bits import KV_DTYPES
from afserve.kernels.ops import Ops, open_ops
from afserve.kernels.paged import PagedBatch
from bench.origin import origin

RESULTS = Path(__file__).resolve().parent / "results" / "kv_dtype.jsonl"
BF16 = torch.bfloat16
BLOCK, PLAIN = 16, "bf16"
DTYPES = {PLAIN: BF16, **KV_DTYPES}
SHAPES = {  # heads, what a layer keeps, the latent's rank
    "32/4 heads of 128": (32, LayerShape(4, 128, 128), 0),
    "64/8 heads of 64": (64, LayerShape(8, 64, 64), 0),
    "32/2 heads of 256": (32, LayerShape(2, 256, 256), 0),
    "32 heads over latents of 512 + 64": (32, LayerShape(1, 576), 512),
}


def batch_of(sequences: int, context: int) -> PagedBatch:
    """Every sequence decodes one token over blocks of its own, which follow each other."""
    each = context // BLOCK
    table = torch.arange(sequences * each, dtype=torch.int32).view(sequences, each)
    position = torch.full((sequences,), context - 1)
    slot = table[:, -1].long() * BLOCK + BLOCK - 1
    start = torch.arange(sequences + 1, dtype=torch.int32)
    return PagedBatch(position, slot, start, position.int() + 1, table, 1, context)


def step_of(ops: Ops, shape: str, dtype: str, sequences: int, context: int) -> Callable[[], object]:
    heads, kept, rank = SHAPES[shape]
    batch = batch_of(sequences, context)
    cache = ops.open_cache([kept], batch.block_table_SB.numel(), BLOCK, DTYPES[dtype]).layers[0]
    tokens = 4096
    for first in range(0, sequences * context, tokens):
        slot = torch.arange(first, min(first + tokens, sequences * context))
        if rank:
            ops.write_latent(torch.randn(len(slot), kept.key).to(BF16), cache[0], slot, rank)
        else:
            k, v = (torch.randn(len(slot), kept.heads, kept.key).to(BF16) for _ in "kv")
            ops.write_kv(k, v, cache[0], cache[1], slot)
    q = torch.randn(sequences, heads, kept.key).to(BF16)
    if rank:
        return lambda: ops.attend_mla(q, cache[0], rank, batch, 0.05)
    return lambda: ops.attend_gqa(q, cache[0], cache[1], batch, 0.05)


def seconds(step: Callable[[], object], least: float) -> float:
    """Of one call, over as many as take `least` seconds."""
    step()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < least:
        step()
        calls += 1
    return (time.perf_counter() - began) / calls


def compared(ops: Ops, shape: str, sequences: int, context: int, rounds: int) -> list[dict[str, object]]:
    steps = {dtype: step_of(ops, shape, dtype, sequences, context) for dtype in DTYPES}
    found: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for _ in range(rounds):
        for dtype, step in steps.items():
            found[dtype].append(seconds(step, 0.3))
    made = []
    for dtype, times in found.items():
        ratios = [plain / each for plain, each in zip(found[PLAIN], times, strict=True)]
        made.append(
            {
                "bench": "kv_dtype",
                "shape": shape,
                "sequences": sequences,
                "context": context,
                "dtype": dtype,
                "ms": round(statistics.median(times) * 1e3, 3),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_low": round(min(ratios), 3),
                "ratio_high": round(max(ratios), 3),
                "threads": ops.threads,
            }
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_dtype", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contexts", default="1024,16384", help="tokens")
    parser.add_argument("--sequences", default="1,8")
    parser.add_argument("--shape", default="", help="of those above, the ones with this in their names")
    parser.add_argument("--isa", default="", help="an instruction set; the best one without")
    parser.add_argument("--save", action="store_true", help="append the rows to bench/results/kv_dtype.jsonl")
    options = parser.parse_args()
    ops = open_ops("cpu", options.threads, "native", **({"isa": options.isa} if options.isa else {}))
    for shape in (name for name in SHAPES if options.shape in name):
        for sequences in map(int, options.sequences.split(",")):
            for context in map(int, options.contexts.split(",")):
                for row in compared(ops, shape, sequences, context, options.rounds):
                    print(json.dumps(row), flush=True)
                    if options.save:
                        with RESULTS.open("a", encoding="utf-8") as file:
                            file.write(json.dumps({**row, **origin(ops.isa)}) + "\n")


if __name__ == "__main__":
    main()
