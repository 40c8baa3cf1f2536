"""`python -m bench.gpu_libraries flashinfer`: a library's ops beside our own kernels, at the sizes of served models.

A JSON line for each op: how far both answers are from one another and how far they may be, microseconds of each in
turns, whether each could be captured in a CUDA graph, and who computed what is called the library's. A library that is
not installed, an op that its own test refuses, and one that fails are lines, too; none of them ends what follows. Exit
status 1 where an answer is too far away. Without a GPU it says "not measured".
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.config_texts import GPU_LIBRARIES
from afserve.errors import ConfigError
from afserve.kernels.delta import DeltaLayer, DeltaRows, DeltaShape
from afserve.kernels.devices.cuda import count_gpus, numbered
from afserve.kernels.devices.opened import device_of
from afserve.kernels.formats.scaled import BlockScaled
from afserve.kernels.layer import MixerParts, StateLayer
from afserve.kernels.libraries.tested import FAILS
from afserve.kernels.ops import Ops
from afserve.kernels.states.rules import Rule
from afserve.kernels.triton.backend import TritonBackend
from bench.cuda_cases import paged_batch
from bench.cuda_clock import Clock

BF16 = torch.bfloat16
APART = {"norms": 0.01, "attention": 0.01, "experts": 0.09, "delta": 0.03}  # of the norm of our own answer
TURNS = 3
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden: int = 7168
    inner: int = 2048
    slots: int = 32
    heads: int = 64
    groups: int = 4
    size: int = 128
    context: int = 4096
    values: int = 32
    tokens: int = 2048
    block: int = 1024
    rows: tuple[int, ...] = (4, 64)  # of an expert
    single: int = 32  # sequences with one token each


@dataclass(frozen=True, slots=True)
class Compared:
    """`made(backend)` is the call; `op` is what a library's tests call it."""

    name: str
    op: str
    made: Callable[[TritonBackend], Callable[[], Tensor]]

    @property
    def allowed(self) -> float:
        return APART[self.name.split(",")[0]]


def cases(sizes: Sizes) -> Iterator[Compared]:
    yield Compared("norms, a norm", "rms_norm", partial(norm, sizes, False))
    yield Compared("norms, a sum and its norm", "add_rms_norm", partial(norm, sizes, True))
    yield Compared(f"attention, {sizes.single} single tokens", "attend_gqa", partial(attention, sizes))
    for rows in sizes.rows:
        yield Compared(f"experts, {rows} rows of each in FP8", "expert_ffn", partial(experts, sizes, rows))
    rules: tuple[Rule, ...] = ("head", "channel")
    for rule in rules:
        for name, op, sequences, tokens in (
            (f"{sizes.single} single tokens", "delta, one token", sizes.single, 1),
            (f"a prompt of {sizes.tokens}", "delta, prompts", 1, sizes.tokens),
        ):
            yield Compared(f"delta, by {rule}, {name}", op, partial(delta, sizes, rule, sequences, tokens))


def norm(sizes: Sizes, summed: bool, backend: TritonBackend) -> Callable[[], Tensor]:
    backend.libraries.test_norms(sizes.hidden, BF16)
    x, y, weight = (
        _drawn(backend, 64, sizes.hidden),
        _drawn(backend, 64, sizes.hidden),
        _drawn(backend, sizes.hidden),
    )
    if not summed:
        return lambda: backend.rms_norm(x, weight, 1e-6)
    return lambda: backend.add_rms_norm(x.clone(), y, weight, 1e-6)


def attention(sizes: Sizes, backend: TritonBackend) -> Callable[[], Tensor]:
    batch = paged_batch(backend.device, sizes.single, 1, sizes.context, 64)
    shape = batch.block_table_SB.numel(), sizes.groups, 64, sizes.size
    k, v, q = (
        _drawn(backend, *shape),
        _drawn(backend, *shape),
        _drawn(backend, sizes.single, sizes.heads, sizes.size),
    )
    backend.libraries.test_attention(sizes.heads, k, v, sizes.size**-0.5, None)
    return lambda: backend.attend_gqa(q, k, v, batch, sizes.size**-0.5, None)


def experts(sizes: Sizes, rows: int, backend: TritonBackend) -> Callable[[], Tensor]:
    """Scales are powers of two, so that every chip's products can be the library's."""
    ops, (h, i) = Ops(backend, backend.device, 1), (sizes.hidden, sizes.inner)
    packed = ops.empty_experts(sizes.slots, h, i, BF16, fp8=True)
    for number in range(sizes.slots):
        ops.set_expert_fp8(packed, number, *(_blocks(backend, *size) for size in ((i, h), (i, h), (h, i))))
    x, out = _drawn(backend, sizes.slots * rows, h), torch.zeros(sizes.slots * rows, h, device=backend.device)
    slot = torch.arange(sizes.slots, dtype=torch.int32, device=backend.device).repeat(rows)[:, None]
    weight = torch.ones(len(x), 1, device=backend.device)

    def call() -> Tensor:
        backend.expert_ffn(x, slot, weight, packed, out, False)
        return out

    return call


def delta(
    sizes: Sizes, rule: Rule, sequences: int, tokens: int, backend: TritonBackend
) -> Callable[[], Tensor]:
    shape = DeltaShape(sizes.values // 2, sizes.values, sizes.size, sizes.size, 4, rule)
    layer = DeltaLayer(shape, _drawn(backend, 4, shape.channels).float() / 2)
    norm_H, map_ = _drawn(backend, 8), backend.pack_linear(_drawn(backend, 8, 8), None)
    parts = MixerParts("head" if rule == "head" else "channel", map_, map_, delta=layer)
    backend.prepare_states(StateLayer(parts, norm_H, norm_H, None, None, None, None, 1e-6))
    count = sequences * tokens
    decay = -F.softplus(_drawn(backend, count, shape.decays).float())
    rows = DeltaRows(
        _drawn(backend, count, shape.channels),
        decay,
        _drawn(backend, count, shape.value_heads).sigmoid().float(),
    )
    context = tokens if tokens > 1 else 100
    batch = paged_batch(backend.device, sequences, tokens, context, sizes.block)
    starts = tuple(range(0, count + 1, tokens))
    batch = replace(batch, starts=starts, contexts=(context,) * sequences)
    states_NF = torch.zeros(batch.block_table_SB.numel(), shape.numbers, device=backend.device)
    return lambda: backend.delta(rows, layer, states_NF.clone(), sizes.block, batch)


def _drawn(backend: TritonBackend, *size: int) -> Tensor:
    """The same numbers for both of the backends, call after call of one size."""
    generator = torch.Generator(backend.device).manual_seed(sum(size))
    return torch.randn(size, device=backend.device, generator=generator).to(BF16)


def _blocks(backend: TritonBackend, outputs: int, inputs: int) -> BlockScaled:
    codes = _drawn(backend, outputs, inputs).to(torch.float8_e4m3fn)
    scale = torch.full((-(-outputs // 128), -(-inputs // 128)), 2.0**-6, device=backend.device)
    return BlockScaled(codes, scale)


def compare(
    case: Compared,
    own: TritonBackend,
    other: TritonBackend,
    seconds: Callable[[Callable[[], object]], Row],
) -> Row:
    """One line. What fails is one, too."""
    row: Row = {"op": case.name, "tested": {}}
    try:
        calls = []
        for backend in (other, own):
            torch.manual_seed(0)
            calls.append(case.made(backend))
            row["tested"] = tested(case, other)
            if not row["tested"]:
                return row  # the library has no such op
        answer, right = (call().double() for call in calls)
        apart = float((answer - right).norm() / right.norm())
        row |= {"apart": round(apart, 5), "allowed": case.allowed, "fine": apart <= case.allowed}
        turns = [[seconds(call) for call in calls] for _ in range(TURNS)]
        for at, name in enumerate(("library", "own")):
            row[f"{name}_us"] = round(1e6 * statistics.median(_number(turn[at]["s"]) for turn in turns), 2)
            row[f"{name}_captured"] = turns[0][at]["captured"]
    except FAILS as error:
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    row["tested"] = tested(case, other)  # some may have failed since
    return row


def tested(case: Compared, backend: TritonBackend) -> dict[str, str]:
    """What a library's tests said of such ops so far, by sizes."""
    passed = [library.ops.passed for library in backend.libraries.opened]
    return {str(size): why or "right" for of in passed for (op, size), why in of.items() if op == case.op}


def _number(value: object) -> float:
    assert isinstance(value, float)
    return value


def timed(clock: Clock, device: torch.device, call: Callable[[], object]) -> Row:
    """Of a replayed graph, or, of what cannot be captured, with the host's time."""
    try:
        return {"s": statistics.median(clock.seconds(call)), "captured": True}
    except FAILS:
        finish, found = device_of(device).finish, []
        for _ in range(clock.repeats):
            finish()
            begin = time.perf_counter()
            call()
            finish()
            found.append(time.perf_counter() - begin)
        return {"s": statistics.median(found), "captured": False}


def rows_of(
    name: str, own: TritonBackend, opened: Callable[[], TritonBackend], sizes: Sizes,
    seconds: Callable[[Callable[[], object]], Row],
) -> Iterator[Row]:  # fmt: skip
    """Of one library: ops that it computes, or why none."""
    try:
        other = opened()
    except ConfigError as error:
        yield {"library": name, "skipped": str(error)}
        return
    for case in cases(sizes):
        row = compare(case, own, other, seconds)
        if row["tested"] or "error" in row:
            yield {"library": name, **row}
    yield {"library": name, "explained": other.explain()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_libraries", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("library", choices=tuple(GPU_LIBRARIES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(arguments)
    if not count_gpus():
        print("not measured: no CUDA device")
        return 0
    device = numbered(torch.device(options.device))
    seconds = partial(timed, Clock(device, options.repeats), device)
    own = TritonBackend.open(device)
    far = False
    for row in rows_of(
        options.library, own, lambda: TritonBackend.open(device, options.library), Sizes(), seconds
    ):
        print(json.dumps(row), flush=True)
        far = far or row.get("fine") is False
    return int(far)


if __name__ == "__main__":
    sys.exit(main())
