"""Compile every kernel the backend would launch for a chip that need not be here; one JSON line per kernel.

`python tests/kernels/triton/compile_for.py 90` runs the real launchers on small CPU tensors of real models' widths,
stops each launch after ptxas and prints registers, stack (spills), shared memory and matrix instructions. With `few`
behind it each kernel has one or two of its tiles, and of those without a matrix product only the shared memory is
told. It runs in its own process because the tests beside it interpret the same kernels.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from afserve.kernels.packed import ExpertShape
from afserve.kernels.paged import PagedBatch
from afserve.kernels.routing import RouterRule, Scoring, Selection
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.kv import rope_write_kv
from afserve.kernels.triton.tiles import TileTable

SHARED = {
    80: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
}  # bytes a program may take (CUDA guide, table 30)
BF16 = torch.bfloat16
MULTIPLIES = re.compile(r"\b(mma|wgmma|tcgen05)\.")  # in PTX
MATRIX = ("HMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")


class AbsentChip:
    """Just enough of a Triton driver to compile for `arch`."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Takes the place of JITFunction.run: compiles, reports each new kernel once, launches nothing."""

    def __init__(self, few: bool) -> None:
        self._run, self._few = JITFunction.run, few
        self._seen: set[str] = set()

    def __call__(self, function: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = self._run(function, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in self._seen:
            self._seen.add(kernel.hash)
            constants = {k: v for k, v in options.items() if isinstance(v, (int, str)) and k.isupper()}
            read = not self._few or MULTIPLIES.search(kernel.asm["ptx"])
            found = usage(kernel) if read else {"shared": kernel.metadata.shared}
            print(json.dumps({"kernel": function.fn.__name__, **found, "constants": constants}), flush=True)
        return kernel


def usage(kernel: Any) -> dict[str, Any]:
    """Registers and stack bytes per thread, shared bytes per program, and which matrix instructions there are."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "-res-usage", "-sass", cubin]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", code).groups())
    found = {name: count for name in MATRIX if (count := len(re.findall(rf"\b{name}", code)))}
    return {"registers": registers, "stack": stack, "shared": kernel.metadata.shared, "matrix": found}


def batch_of(sequences: int, queries: int, context: int, blocks: int = 8) -> PagedBatch:
    tokens = sequences * queries
    long, short = (torch.zeros(tokens, dtype=torch.int64) for _ in range(2))
    starts, contexts, table = (
        torch.zeros(s, dtype=torch.int32) for s in (sequences + 1, sequences, (sequences, blocks))
    )
    return PagedBatch(long, short, starts, contexts, table, queries, context)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def experts(ops: TritonBackend, fp8: bool, few: bool) -> None:
    """DeepSeek-V3's expert, from one row to thousands per slot."""
    shape = ExpertShape(1, 7168, 2048, BF16)
    packed = ops.empty_experts_fp8(shape) if fp8 else ops.empty_experts(shape)
    for rows in (1, 600) if few else (1, 32, 128, 600):
        slot, weight = zeros(rows, 1, dtype=torch.int32), zeros(rows, 1, dtype=torch.float32)
        ops.expert_ffn(zeros(rows, 7168), slot, weight, packed, zeros(rows, 7168), False)
    if fp8:
        ops.set_expert(packed, 0, zeros(4096, 7168), zeros(7168, 2048))


def routers(ops: TritonBackend) -> None:
    v3 = RouterRule(8, Scoring.SIGMOID, Selection.GROUP_TOP2_SUM, 8, 4, True, 1e-20, 2.5)
    ops.route(zeros(4, 7168), zeros(256, 7168, dtype=torch.float32), zeros(256), v3)
    ops.route(zeros(4, 4096), zeros(128, 4096), None, RouterRule(8, Scoring.SOFTMAX, renormalise=True))
    ops.route(zeros(4, 2880), zeros(32, 2880), None, RouterRule(4, Scoring.TOPK_SOFTMAX))


def small_ops(ops: TritonBackend, few: bool) -> None:
    for hidden in (7168,) if few else (128, 4096, 7168):
        ops.rms_norm(zeros(3, hidden), zeros(hidden), 1e-6)
        ops.add_rms_norm(zeros(3, hidden), zeros(3, hidden), zeros(hidden), 1e-6)
    sums, bad = zeros(3, 7168, dtype=torch.float32), zeros(3, dtype=torch.int32)
    ops.add_sums(zeros(3, 7168), sums, bad, 2)
    ops.mlp(zeros(1, 64), ops.pack_linear(zeros(128, 64), None), ops.pack_linear(zeros(64, 64), None))
    at = zeros(3, dtype=torch.int64)
    angle, cache, latent = zeros(9, 64, dtype=torch.float32), zeros(2, 4, 64, 128), zeros(2, 64, 576)
    ops.rope(zeros(3, 64, 128), angle, angle, at, False)
    ops.write_kv(zeros(3, 4, 128), zeros(3, 4, 128), cache, cache, at)
    ops.write_latent(zeros(3, 576), latent, at, 512)
    q, k, norm = zeros(3, 64, 128), zeros(3, 4, 128), zeros(128)
    rope_write_kv(q, k, k, angle, angle, at, cache, cache, at, False)
    rope_write_kv(q, k, k, angle, angle, at, cache, cache, at, False, norm, norm, 1e-6)


def attention(ops: TritonBackend, few: bool) -> None:
    shapes = ((64, 4, 128, None), (64, 8, 64, 128), (16, 2, 256, None))
    for heads, groups, size, window in shapes[:2] if few else shapes:
        cache = zeros(2, groups, 64, size)
        for queries in (1, 3):
            q, batch = zeros(2 * queries, heads, size), batch_of(2, queries, 4096)
            ops.attend_gqa(q, cache, cache, batch, 0.1, window, zeros(heads) if window else None)
    for heads in (128,) if few else (16, 128):
        for queries in (1, 3):
            ops.attend_mla(
                zeros(2 * queries, heads, 576), zeros(2, 64, 576), 512, batch_of(2, queries, 4096), 0.1
            )


def main() -> None:
    arch, few = int(sys.argv[1]), sys.argv[2:] == ["few"]
    driver.set_active(AbsentChip(arch))
    compiler = Compiler(few)

    def run(
        function: Any, *args: Any, **options: Any
    ) -> Any:  # a plain function, so that it binds as a method
        return compiler(function, *args, **options)

    JITFunction.run = run
    ops = TritonBackend(torch.device("cpu"), 132, TileTable(SHARED[arch]), arch >= 89)
    experts(ops, fp8=False, few=few)
    if arch >= 89:
        experts(ops, fp8=True, few=few)
    routers(ops)
    small_ops(ops, few)
    attention(ops, few)


if __name__ == "__main__":
    main()
