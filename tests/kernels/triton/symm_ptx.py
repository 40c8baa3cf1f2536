"""What the compiler makes of the kernels of `symm` for a chip that need not be here; prints one JSON object.

`python -m tests.kernels.triton.symm_ptx 90`: by kernel its variants over what serving launches, and every instruction
of PTX that orders memory or is atomic. A process of its own because the tests beside it interpret the same kernels.
"""

import json
import re
import sys
from collections import defaultdict
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from afserve.comm.device_exchange.ends import Boxes, SymmAttention, SymmExpert
from afserve.comm.m2n.routes import LayerRoutes
from afserve.comm.transport import Layout, WireType
from afserve.kernels.triton import symm
from bench.gpu_chip import AbsentChip

ORDERS = re.compile(
    r"^\s+(?:@\S+\s+)?((?:atom\.|red\.|fence|membar|st\.release|ld[\w.]*\.acquire|ld\.volatile)[\w.:]*)", re.M
)


def flags(memory: torch.Tensor) -> None:
    counts, at = torch.zeros((4, 64), dtype=torch.int32), memory.data_ptr() // 256 * 256
    for box in range(3):
        for flag in (at, at + 256):
            symm.raise_flag[(1,)](flag, counts, box, CHIP=True, num_warps=1)
            for size in (1, 48, 14_400, 14_408):
                for words in (at, at + 16):
                    symm.await_flag[(1,)](
                        flag, counts, box, memory, size, words, 30_000_000_000, CHIP=True, BYTES=1024
                    )


def exchange(memory: torch.Tensor) -> None:
    layout = Layout(7168, 8, 128, 1, 58, 64, WireType.BFLOAT16, WireType.BFLOAT16)
    boxes = Boxes.at([memory.data_ptr()] * 4, [memory.data_ptr()] * 4, torch.device("cpu"), memory)
    front, back = SymmAttention(layout, [boxes]), SymmExpert(layout, [boxes])
    x_TH, stamp = torch.zeros(16, 7168, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    expert_TK, weight_TK, slot_EP = (
        torch.zeros(16, 8, dtype=torch.int32),
        torch.zeros(16, 8),
        torch.zeros(257, 2),
    )
    routes = LayerRoutes(slot_EP.int(), slot_EP[:, :1].contiguous(), 4, 64)
    ticket = front.dispatch(x_TH, expert_TK, weight_TK, stamp, 0, routes)
    front.combine(ticket)
    for shared_TH in (None, x_TH):
        front.fold_sums(ticket, x_TH, shared_TH, None, 0)
    back.answer(back.receive(0), torch.zeros(512, 7168, dtype=torch.bfloat16))


def main() -> None:
    driver.set_active(AbsentChip(int(sys.argv[1])))
    run, seen = JITFunction.run, defaultdict[str, dict[str, str]](dict)

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        kernel = run(function, *args, grid=grid, warmup=True, **options)
        seen[function.fn.__name__][kernel.hash] = kernel.asm["ptx"]

    JITFunction.run = compile_only
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    flags(memory)
    exchange(memory)
    found = {
        name: {
            "variants": len(of),
            "orders": sorted({one for ptx in of.values() for one in ORDERS.findall(ptx)}),
        }
        for name, of in seen.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
