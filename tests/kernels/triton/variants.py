"""How many variants of each kernel a range of batch sizes would compile; prints one JSON object, compiles nothing.

`python -m tests.kernels.triton.variants`: every variant past the first is a pause of a second or more while serving. It
runs in its own process because the tests beside it interpret the same kernels.
"""

import json
from collections import defaultdict
from typing import Any

import torch
import triton
from triton.runtime import driver

from afserve.kernels.delta import DeltaLayer, DeltaRows, DeltaShape
from afserve.kernels.packed import ExpertShape
from afserve.kernels.routing import RouterRule, Scoring, Selection
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.state_prompts import move_prompts
from afserve.kernels.triton.states import move_rows
from bench.gpu_chip import AbsentChip
from bench.gpu_launches import BF16, F32, batch_of, zeros

TOKENS = (1, 2, 3, 8, 15, 16, 17, 32, 33, 48, 64, 100)
RULE = RouterRule(8, Scoring.SIGMOID, Selection.GROUP_TOP2_SUM, 8, 4, True, 1e-20, 2.5)


def decode_step(ops: TritonBackend, tokens: int, experts: Any, fp8: Any) -> None:
    """What a decode step of `tokens` sequences launches, with routing that stays in one class of tiles."""
    x, norm = zeros(tokens, 7168), zeros(7168)
    ops.add_rms_norm(x, x, norm, 1e-6)
    ops.rms_norm(x, norm, 1e-6)
    ops.add_parts([x.float()] * 4)
    for layer in (0, 1, 16):
        ops.add_sums(x, x.float(), zeros(tokens, dtype=torch.int32), layer)
    chosen = ops.route(x, zeros(256, 7168), zeros(256, dtype=torch.float32), RULE)
    for packed in (experts, fp8):
        ops.expert_ffn(x, *chosen, packed, x, False)
    at, angle = zeros(tokens, dtype=torch.int64), zeros(9, 64, dtype=torch.float32)
    cache, latent = zeros(2, 4, 64, 128), zeros(2, 64, 576)
    ops.rope(zeros(tokens, 64, 128), angle, angle, at, False)
    ops.write_kv(zeros(tokens, 4, 128), zeros(tokens, 4, 128), cache, cache, at)
    ops.write_latent(zeros(tokens, 576), latent, at, 512)
    shape, wide = DeltaShape(16, 32, 128, 128, 4), zeros(tokens, 8192 + 4096 + 64)
    layer, state = DeltaLayer(shape, zeros(4, 8192, dtype=F32)), zeros(2, shape.numbers, dtype=F32)
    rates = zeros(32, dtype=F32), zeros(32, dtype=F32)
    mixed, gate, share, forget = wide.split((8192, 4096, 32, 32), 1)
    rows = DeltaRows(mixed, *ops.steps.forget_rows(forget, share, *rates, None))
    ops.steps.open_rows(zeros(tokens, 16, 256), zeros(tokens, 4096))
    for first, spans in (
        (0, [(0, tokens + 1)]),
        (1, [(0, tokens + 1), (70, 75)]),
        (16, [(64, 64 + tokens)] * 16),
    ):
        batch = batch_of(first + len(spans), 1, 5000, blocks=tokens)
        out, given = zeros(tokens, 32, 128, dtype=F32), (rows, layer, state, batch)
        move_prompts(*given, first, spans, 64, out)
    for context in (100, 5000):
        batch = batch_of(tokens, 1, context, blocks=-(-context // 64))
        read = move_rows(rows, layer, state, batch.block_table_SB, at, 64)
        ops.steps.gate_heads(ops.rms_norm, read, zeros(128), 1e-6, gate, silu=True)
        ops.attend_gqa(zeros(tokens, 64, 128), cache, cache, batch, 0.1, None)
        ops.attend_mla(zeros(tokens, 128, 576), latent, 512, batch, 0.1)


def main() -> None:
    driver.set_active(AbsentChip(90))
    seen: dict[str, set[str]] = defaultdict(set)

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        seen[fn.name.rpartition(".")[2]].add(key)
        return True  # compile nothing

    triton.knobs.runtime.jit_cache_hook = note
    ops = TritonBackend(torch.device("cpu"), 132)
    experts, fp8 = (
        make(ExpertShape(256, 7168, 16, BF16)) for make in (ops.empty_experts, ops.empty_experts_fp8)
    )
    for tokens in TOKENS:
        decode_step(ops, tokens, experts, fp8)
    print(json.dumps({name: len(keys) for name, keys in sorted(seen.items())}))


if __name__ == "__main__":
    main()
