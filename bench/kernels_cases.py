"""What `bench.kernels` runs: closures over data larger than the caches, with the bytes and FLOPs each call needs."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from afserve.engine.kv.free_blocks import FreeBlocks
from afserve.kernels.grouped import Groups
from afserve.kernels.layer import BoundGqa, GqaLayer
from afserve.kernels.native import Native
from afserve.kernels.packed import PackedExperts
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference
from afserve.kernels.routing import RouterRule, Scoring
from afserve.launch.measure.clock import out_of_cache
from afserve.launch.measure.experts import BF16, INT8, PLAIN, WeightKind, drawn_expert, fill, grouped_kind

SHAPES = ((32, 512, 256), (16, 2048, 768), (4, 7168, 2048))  # experts, hidden, inner
ROWS = (1, 2, 3, 4, 8, 16, 32, 128)
HEADS = ((8, 2, 64), (32, 4, 128))  # query heads, key/value heads, head size
BATCHES, CONTEXTS = (1, 8, 64), (128, 1024, 8192)
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Case:
    """`run` makes `calls` calls of `bytes` and `flops` each; `peer` makes `peer_calls` of the same work.

    less: what is no part of the work, run for itself and taken off."""

    op: str
    case: str
    run: Callable[[], object]
    calls: int = 1
    bytes: int = 0
    flops: int = 0
    peer: Callable[[], object] | None = None
    peer_calls: int = 1
    share_of: Callable[[], object] | None = None
    less: Callable[[], object] | None = None
    repeats: int = 7


KINDS = (
    PLAIN,
    INT8,
    *(grouped_kind(f"int4/{g.size}{'w' * g.wide}", g) for g in (Groups(32), Groups(128, wide=True))),
)
"""`int4/32`: 32 inputs to a scale of 16 bits; `w`: of 32 bits, as a checkpoint's own codes are kept."""


def expert_cases(native: Native, quick: bool, kinds: tuple[WeightKind, ...] = KINDS) -> Iterator[Case]:
    for experts, hidden, inner in SHAPES[:1] if quick else SHAPES:
        weights = 3 * experts * hidden * inner
        up, down = drawn_expert(hidden, inner)
        for kind in kinds:
            size = int(weights * kind.bytes)
            banks = [kind.empty(native, experts, hidden, inner) for _ in range(-(-out_of_cache() // size))]
            fill(native, banks, up, down)
            plain = torch_bank(experts, up, down) if kind == PLAIN else None
            for rows in ROWS:
                yield expert_case(native, banks, plain, rows, size, kind.name)


def torch_bank(experts: int, up: Tensor, down: Tensor) -> PackedExperts:
    return PackedExperts(
        experts, up.shape[1], down.shape[1], up.repeat(experts, 1, 1), down.repeat(experts, 1, 1), dtype=BF16
    )


def expert_case(
    native: Native, banks: list[PackedExperts], plain: PackedExperts | None, rows: int, size: int, kind: str
) -> Case:
    bank = banks[0]
    total = rows * bank.experts
    x = torch.randn(total, bank.hidden).to(BF16)
    slot = (torch.arange(total) % bank.experts).int()[:, None].contiguous()
    weight, out = torch.ones(total, 1), torch.empty(total, bank.hidden, dtype=BF16)

    def run() -> None:
        for each in banks:
            native.expert_ffn(x, slot, weight, each, out, False)

    def loop() -> None:
        assert plain is not None
        Reference().expert_ffn(x, slot, weight, plain, out, False)

    return Case(
        "expert_ffn", f"{bank.experts}x{bank.hidden}x{bank.inner} {kind} rows {rows}", run, len(banks), size,
        6 * total * bank.hidden * bank.inner, None if plain is None else loop, repeats=5,
    )  # fmt: skip


def batches(sequences: int, context: int, blocks: int) -> list[PagedBatch]:
    """Decode batches that together walk through the whole cache, as sequences that grew in turn got their blocks."""
    each, free = context // BLOCK, FreeBlocks(blocks)
    position = torch.full((sequences,), context - 1)
    made = []
    for _ in range(min(blocks // (sequences * each), 20000 // sequences)):
        rows: list[list[int]] = [[] for _ in range(sequences)]
        for _ in range(each):
            for row in rows:
                row.append(free.take(row[-1] if row else None))
        table = torch.tensor(rows, dtype=torch.int32)
        slot = table[:, -1].long() * BLOCK + BLOCK - 1
        start = torch.arange(sequences + 1, dtype=torch.int32)
        made.append(PagedBatch(position, slot, start, position.int() + 1, table, 1, context))
    return made


def attention_cases(native: Native, quick: bool) -> Iterator[Case]:
    for heads, groups, size in HEADS[:1] if quick else HEADS:
        token = 2 * groups * size * 2
        blocks = max(out_of_cache() // (token * BLOCK), BATCHES[-1] * CONTEXTS[-1] // BLOCK)
        cache = native.empty_kv((blocks, groups, BLOCK), (size, size), BF16)
        k, v = (tensor.fill_(0.5) for tensor in cache)
        for sequences in BATCHES:
            for context in CONTEXTS:
                q = torch.randn(sequences, heads, size).to(BF16)
                steps = batches(sequences, context, blocks)

                def run(q: Tensor = q, k: Tensor = k, v: Tensor = v, steps: list[PagedBatch] = steps) -> None:
                    for batch in steps:
                        native.attend_gqa(q, k, v, batch, 0.1, None)

                name = f"{heads}/{groups} heads of {size}, batch {sequences}, context {context}"
                seen = sequences * context
                yield Case(
                    "attend_gqa", name, run, len(steps), seen * token, 4 * seen * heads * size, repeats=5
                )


def small_cases(native: Native, quick: bool) -> Iterator[Case]:
    """Everything of a layer that is neither a product nor attention, as a share of the whole layer out of cache. Layers
    do it inside one call, so what six calls with no rows take is taken off."""
    hidden, heads, groups, size, experts, inner, top_k = 512, 8, 2, 64, 32, 256, 4
    rule = RouterRule(top_k, Scoring.SOFTMAX, renormalise=True)
    angle = torch.rand(4096, size // 2) * 6
    one, head = torch.ones(hidden, dtype=BF16), torch.ones(size, dtype=BF16)
    gate = torch.randn(experts, hidden).to(BF16) / hidden**0.5
    prepared = native.prepare_gqa(
        GqaLayer(
            one, native.pack_linear(torch.randn((heads + 2 * groups) * size, hidden).to(BF16) / 23, None), head, head,
            angle.cos(), angle.sin(), native.pack_linear(torch.randn(hidden, heads * size).to(BF16) / 23, None), one,
            gate, None, rule, heads, groups, size, 1e-6, 0.125,
        )
    )  # fmt: skip
    count = -(-out_of_cache() // (3 * experts * hidden * inner * 2))
    banks = itertools.cycle([PLAIN.empty(native, experts, hidden, inner) for _ in range(count)])
    for sequences in (1, 64) if quick else (1, 8, 32, 64):
        cache = native.empty_kv((sequences * 8, groups, BLOCK), (size, size), BF16)
        batch = batches(sequences, 128, sequences * 8)[0]
        x = torch.randn(sequences, hidden).to(BF16)
        qkv = torch.randn(sequences, heads + 2 * groups, size).to(BF16)
        _, k, v = qkv.split((heads, groups, groups), dim=1)

        def small(x: Tensor = x, qkv: Tensor = qkv, k: Tensor = k, v: Tensor = v, batch: PagedBatch = batch,
                  cache: tuple[Tensor, Tensor] = cache) -> None:  # fmt: skip
            native.rms_norm(x, one, 1e-6)
            native.rms_norm(qkv, head, 1e-6)
            native.rope(qkv, prepared.layer.cos_PD, prepared.layer.sin_PD, batch.position_T, False)
            native.write_kv(k, v, cache[0], cache[1], batch.kv_slot_T)
            native.add_rms_norm(x, x, one, 1e-6)
            native.route(x, gate, None, rule)

        bound, of_step = native.bind_gqa(prepared, *cache), native.bind_batch(batch)

        def whole(x: Tensor = x, batch: PagedBatch = of_step, bound: BoundGqa = bound) -> None:
            half = native.gqa_half(x, bound, batch)
            assert half is not None and half.expert_TK is not None and half.weight_TK is not None
            native.expert_ffn(half.normed_TH, half.expert_TK, half.weight_TK, next(banks), x, True)

        none = replace(batch, position_T=batch.position_T[:0], kv_slot_T=batch.kv_slot_T[:0])

        empty = (x[:0], qkv[:0], k[:0], v[:0], none, cache)
        calls = partial(small, *empty)
        yield Case("small_ops", f"batch {sequences}", small, share_of=whole, less=calls, repeats=200)
