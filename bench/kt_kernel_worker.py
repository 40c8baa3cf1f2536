"""One engine of `bench.kt_kernel`: the routed experts of one layer, ours or KTransformers'.

Both are this file, each run by the interpreter that has its engine, so weights, rows and routing are the same numbers.
Of this project and of kt-kernel it imports what its own engine needs only. Arguments: engine (ours, kt), form, experts,
hidden, inner, top_k, threads, most rows, instruction set. The first line that it prints says that it is ready; then it
answers {"rows", "seed", "seconds"} lines with {"us"} and {"rows", "seed", "check": true} with {"error"}.

Shapes: R rows, K choices, E experts, H hidden, I inner.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

BF16 = torch.bfloat16
GROUP = 32
E2M1 = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]).char()
"""Twice the numbers of MXFP4, without their sign."""
CALLS = 3  # of a turn, at least


@dataclass(frozen=True, slots=True)
class Layer:
    experts: int
    hidden: int
    inner: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight in four bits: code_OI int8 -8 .. 7 (or twice e2m1) and scale_OG in bfloat16, G = I / 32."""

    code_OI: Tensor
    scale_OG: Tensor

    def dequantised(self) -> Tensor:
        return self.code_OI.float() * self.scale_OG.float().repeat_interleave(GROUP, 1)


Weights = tuple[Tensor, Tensor, Tensor]
"""gate_IH, up_IH and down_HI of one expert."""


class Engine(Protocol):
    name: str
    isa: str

    def run(self, x_RH: Tensor, expert_RK: Tensor, weight_RK: Tensor, out_RH: Tensor) -> None: ...


def weights_of(layer: Layer) -> Iterator[Weights]:
    """Expert after expert. Each is the first one's numbers in other places: random ones for all take minutes."""
    source = torch.Generator().manual_seed(1)
    sizes = (layer.inner, layer.hidden), (layer.inner, layer.hidden), (layer.hidden, layer.inner)
    first = [torch.randn(*size, generator=source).div_(size[1] ** 0.5).to(BF16) for size in sizes]
    for expert in range(layer.experts):
        gate, up, down = (each.roll((expert * 13, expert * 7), (0, 1)) for each in first)
        yield gate, up, down


def codes_of(weight_OI: Tensor, e2m1: bool) -> Codes:
    """To the nearest, except that the largest of a group may not be met: both engines get the same codes."""
    outputs, inputs = weight_OI.shape
    by_group = weight_OI.float().view(outputs, inputs // GROUP, GROUP)
    scale = by_group.abs().amax(2) / (12 if e2m1 else 7)
    scale = (2 ** scale.log2().ceil() if e2m1 else scale).to(BF16)
    wanted = by_group / scale.float().unsqueeze(2)
    if not e2m1:
        return Codes(wanted.round_().clamp_(-8, 7).char().view(outputs, inputs), scale)
    step = (E2M1[1:].float() + E2M1[:-1].float()) / 2
    code = E2M1[torch.bucketize(wanted.abs(), step)] * wanted.sign().char()
    return Codes(code.view(outputs, inputs), scale)


def rows_of(layer: Layer, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x_RH, expert_RK int64 and weight_RK float32: each row goes to top_k different experts, all alike likely."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, layer.hidden, generator=source).to(BF16)
    chosen = torch.rand(rows, layer.experts, generator=source).topk(layer.top_k).indices
    weight = torch.rand(rows, layer.top_k, generator=source).softmax(1)
    return x, chosen.contiguous(), weight


def reference(layer: Layer, x_RH: Tensor, expert_RK: Tensor, weight_RK: Tensor) -> Tensor:
    """In float32, from weights that are not rounded."""
    out, x = torch.zeros(x_RH.shape), x_RH.float()
    for expert, parts in enumerate(weights_of(layer)):
        row, choice = (expert_RK == expert).nonzero(as_tuple=True)
        if len(row):
            gate, up, down = (part.float() for part in parts)
            y = (torch.nn.functional.silu(x[row] @ gate.T) * (x[row] @ up.T)) @ down.T
            out.index_add_(0, row, y * weight_RK[row, choice, None])
    return out


class Ours:
    """afserve's native library."""

    def __init__(self, form: str, layer: Layer, threads: int, isa: str) -> None:
        from afserve import __version__
        from afserve.kernels.grouped import Grouped, Groups
        from afserve.kernels.native import Native
        from afserve.kernels.packed import ExpertShape

        self._native = Native(threads, isa)
        self.name, self.isa = f"afserve {__version__}", self._native.isa
        shape = ExpertShape(layer.experts, layer.hidden, layer.inner, BF16)
        coded, e2m1 = form in ("int4", "mxfp4", "int4 rows"), form == "mxfp4"
        self._bank = (
            self._native.empty_experts_int4(shape, Groups(GROUP, e2m1=e2m1))
            if coded
            else self._native.empty_experts(shape, form == "int8")
        )
        for slot, (gate, up, down) in enumerate(weights_of(layer)):
            pair = torch.cat((gate, up)), down
            if coded:
                made = (codes_of(each, e2m1) for each in pair)
                gate_up_codes, down_codes = (
                    Grouped(each.code_OI, each.scale_OG.float(), GROUP) for each in made
                )
                self._native.set_expert_int4(self._bank, slot, gate_up_codes, down_codes)
            else:
                self._native.set_expert(self._bank, slot, *pair)

    def run(self, x_RH: Tensor, expert_RK: Tensor, weight_RK: Tensor, out_RH: Tensor) -> None:
        self._native.expert_ffn(x_RH, expert_RK.int(), weight_RK, self._bank, out_RH, False)


class Theirs:
    """kt-kernel's classes, as its own wrappers make them (kt_kernel/utils/amx.py). `form`: bf16; int8 and "int4 rows",
    rounded by itself with a scale for each output; int4 and mxfp4, the codes that ours has."""

    def __init__(self, form: str, layer: Layer, threads: int, most: int) -> None:
        import kt_kernel
        from kt_kernel_ext import moe

        pool = kt_kernel.kt_kernel_ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        self._cpu = kt_kernel.kt_kernel_ext.CPUInfer(pool)
        self.name, self.isa = f"kt-kernel {kt_kernel.__version__}", str(kt_kernel.__cpu_variant__)
        self._elsewhere = torch.zeros(layer.experts, dtype=torch.bool)
        config = moe.MOEConfig(
            layer.experts, layer.top_k, layer.hidden, layer.inner, self._elsewhere.data_ptr()
        )
        config.layer_idx, config.pool, config.max_len = 0, self._cpu.backend_, max(most, 32)
        sources = self._point(config, form, [self._kept(form, parts) for parts in weights_of(layer)])
        kind = {
            "bf16": "AMXBF16_MOE", "int8": "AMXInt8_MOE", "int4 rows": "AMXInt4_MOE", "int4": "AMXInt4_KGroup_MOE",
            "mxfp4": "AMXFP4_KGroup_MOE",
        }  # fmt: skip
        self._moe = getattr(moe, kind[form])(config)
        order = torch.arange(layer.experts)
        self._cpu.submit(self._moe.load_weights_task(order.data_ptr()))
        self._cpu.sync()
        del sources  # it has copies in its own order

    @staticmethod
    def _kept(form: str, parts: Weights) -> list[Tensor]:
        """Gate, up, down; and their scales behind them where there are any, of e2m1 numbers rather than twice those."""
        if form not in ("int4", "mxfp4"):
            return list(parts)
        made, twice = [codes_of(part, form == "mxfp4") for part in parts], 2 if form == "mxfp4" else 1
        return [
            *(packed_nibbles(each.code_OI, form) for each in made),
            *(each.scale_OG * twice for each in made),
        ]

    @staticmethod
    def _point(config: Any, form: str, kept: list[list[Tensor]]) -> list[Tensor]:
        """Tells where weights are, and gives what has to live until they are loaded."""
        names = ("gate_projs", "up_projs", "down_projs", "gate_scales", "up_scales", "down_scales")
        if form in ("int8", "int4 rows"):
            whole = [torch.stack([each[part] for each in kept]) for part in range(3)]
            config.gate_proj, config.up_proj, config.down_proj = (each.data_ptr() for each in whole)
            return whole
        for part, name in enumerate(names):
            found = [each[part].data_ptr() if part < len(each) else 0 for each in kept]
            setattr(config, name, [found])
        if form != "bf16":
            config.quant_config.bits, config.quant_config.group_size = 4, GROUP
            config.quant_config.zero_point = False
        return [tensor for each in kept for tensor in each]

    def run(self, x_RH: Tensor, expert_RK: Tensor, weight_RK: Tensor, out_RH: Tensor) -> None:
        rows = torch.tensor([x_RH.shape[0]], dtype=torch.int32)
        held = expert_RK, weight_RK, x_RH, out_RH
        self._cpu.submit(
            self._moe.forward_task(
                rows.data_ptr(), expert_RK.shape[1], *(each.data_ptr() for each in held), False
            )
        )
        self._cpu.sync()


def packed_nibbles(code_OI: Tensor, form: str) -> Tensor:
    """Two codes a byte, the first in the low half: whole numbers plus 8, or sign and place of an e2m1 number."""
    if form == "mxfp4":
        place = torch.bucketize(code_OI.abs().int(), E2M1.int())
        nibble = place + 8 * (code_OI < 0)
    else:
        nibble = code_OI.int() + 8
    low, high = nibble[:, ::2], nibble[:, 1::2]
    return (low + high * 16).to(torch.uint8).contiguous()


def seconds_of(engine: Engine, layer: Layer, rows: int, seed: int, seconds: float) -> float:
    """The median of calls, each with rows and experts of its own, that are made before."""
    out = torch.empty(rows, layer.hidden, dtype=BF16)
    inputs = [rows_of(layer, rows, seed * 64 + number) for number in range(8)]
    engine.run(*inputs[-1], out)
    found: list[float] = []
    while len(found) < CALLS or sum(found) < seconds:
        x, expert, weight = inputs[len(found) % len(inputs)]
        begin = time.perf_counter()
        engine.run(x, expert, weight, out)
        found.append(time.perf_counter() - begin)
    return median(found)


def error_of(engine: Engine, layer: Layer, rows: int, seed: int) -> float:
    """Of the outputs, beside those of weights that are not rounded: the distance, as a share of their length."""
    x, expert, weight = rows_of(layer, rows, seed)
    out = torch.empty(rows, layer.hidden, dtype=BF16)
    engine.run(x, expert, weight, out)
    wanted = reference(layer, x, expert, weight)
    return float((out.float() - wanted).norm() / wanted.norm())


def main(name: str, form: str, *numbers: str) -> None:
    experts, hidden, inner, top_k, threads, most = (int(number) for number in numbers[:6])
    layer = Layer(experts, hidden, inner, top_k)
    torch.set_num_threads(threads)
    engine: Engine = (
        Theirs(form, layer, threads, most) if name == "kt" else Ours(form, layer, threads, numbers[6])
    )
    print(json.dumps({"name": engine.name, "isa": engine.isa}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("check"):
            answer = {"error": error_of(engine, layer, asked["rows"], asked["seed"])}
        else:
            answer = {"us": seconds_of(engine, layer, asked["rows"], asked["seed"], asked["seconds"]) * 1e6}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
