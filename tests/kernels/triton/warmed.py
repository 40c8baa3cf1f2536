"""How many kernels serving would compile that were not compiled before a node was ready; prints one JSON object.

`python -m tests.kernels.triton.warmed FOLDER`: of the model there, compiles nothing. In a process of its own, as
`variants.py`.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime import driver

from afserve.comm.device_exchange import rehearsal
from afserve.comm.device_exchange.ends import Patience
from afserve.comm.m2n.fused_message import rehearse_message
from afserve.config import EngineConfig, ModelSource
from afserve.engine import warm
from afserve.engine.build import build_expert_bank, dtype_of, layout_for, spec_of, tensors_of
from afserve.engine.kv.cache import KvCache
from afserve.families.table import naming_of
from afserve.kernels.ops import Ops
from afserve.kernels.triton.backend import TritonBackend
from afserve.models.decoder import AttentionModel
from bench.gpu_chip import AbsentChip

SERVED = [
    ([1] * 2, 7), ([1] * 8, 100), ([1] * 33, 190), ([1], 150), ([5], 5), ([64], 64), ([17], 130), ([1, 1, 9], 40),
    ([190], 190), ([1, 150], 150),
]  # fmt: skip
ROWS = (2, 3, 9, 17, 40, 130, 511)


def main(folder: str) -> None:
    driver.set_active(AbsentChip(90))
    seen: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        seen.add((fn.name.rpartition(".")[2], key))
        return True  # compile nothing

    triton.knobs.runtime.jit_cache_hook = note
    source, device = ModelSource(folder, "m", dtype="bfloat16"), torch.device("cpu")
    spec, ops = spec_of(source), Ops(TritonBackend(device, 132), device, 1)
    config = EngineConfig(
        max_model_len=200, kv_blocks=64, block_size=8, max_batch_tokens=512, micro_batches=1
    )
    dummy = replace(source, load_format="dummy")
    tensors, dtype = tensors_of(dummy, spec, device), dtype_of(source, spec)
    model = AttentionModel(spec, tensors, naming_of(spec), ops, dtype, config.max_model_len)
    kv = KvCache(model, config)
    held = [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(spec.experts)]
    bank = build_expert_bank(dummy, held, spec.experts, ops=ops)
    like_TH, top_k = torch.empty((0, spec.hidden), dtype=dtype), spec.moe.top_k
    experts = partial(warm.warm_experts, bank, spec.moe_layers, like_TH, top_k, spec.experts, 512)
    ops.compile_ahead(experts)
    ops.compile_ahead(partial(warm.warm_attention, model, kv, config))
    ahead = set(seen)
    steps, calls = warm.warm_attention(model, kv, config), experts()
    found = {"unexpected": sorted({name for name, _ in seen - ahead})}
    exchanged = replace(config, device_exchange=True, wire_dtype="fp8")
    layout = layout_for(source, spec, exchanged, spec.experts)
    for nodes in (1, 2):  # an expert node's end, and one of an attention node
        rehearsal.exchange_with_itself(layout, nodes, device, dtype, Patience())
    rehearse_message(layout, device, dtype)
    before = set(seen)
    serve = warm._step
    for queries, context in SERVED:
        warm.run_once(model, kv, config, serve(queries, context, warm._block_sizes(kv), device))
    for rows in ROWS:
        warm.warm_experts(bank, 1, like_TH, top_k, spec.experts, rows)
    for rehearsal.ROWS in (1, *ROWS):
        for nodes, slots in ((1, 1), (2, 6), (3, 64)):
            served = replace(layout, slots=slots)
            rehearsal.exchange_with_itself(served, nodes, device, dtype, Patience())
            rehearse_message(served, device, dtype, rehearsal.ROWS)
    late = sorted({name for name, _ in seen - before})
    print(json.dumps(found | {"steps": steps, "calls": calls, "compiled": len(before), "late": late}))


if __name__ == "__main__":
    main(sys.argv[1])
