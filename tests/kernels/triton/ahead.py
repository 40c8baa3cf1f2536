"""Which threads compile two kernels ahead, and whether they are there afterwards; prints one JSON object.

`python -m tests.kernels.triton.ahead`: for sm_90, which nobody needs to have. In a process of its own, as
`variants.py`.
"""

import json
import threading
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from afserve.kernels.triton.ahead import compile_ahead
from afserve.kernels.triton.launch import launched
from bench.gpu_chip import AbsentChip

COLUMNS = (16, 32)


@launched
def kernel(x_ptr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr + tl.arange(0, COLUMNS), 1.0)


def main() -> None:
    driver.set_active(AbsentChip(90))
    threads: list[str] = []
    compiled = triton.compiler.compile

    def noted(*given: Any, **how: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compiled(*given, **how)

    triton.compiler.compile = noted
    filled = []

    def warm() -> None:
        for columns in COLUMNS:
            x = torch.empty(64)
            kernel[1, 1, 1](x, COLUMNS=columns)
            filled.append(
                float(x.abs().sum() + x.new_empty(64).abs().sum() + torch.empty_like(x).abs().sum())
            )

    compile_ahead(warm)
    ahead = len(threads)
    for columns in COLUMNS:  # what a launch asks for, without one
        kernel.run(torch.empty(64), COLUMNS=columns, grid=(1, 1, 1), warmup=True)
    print(json.dumps({"threads": threads, "again": len(threads) - ahead, "filled": filled}))


if __name__ == "__main__":
    main()
