"""Inputs of kernels and what has to come out of them, as a file that `run_cases.cpp` reads (how it lies: `cases.h`).

The vectors are those of the tests of the library on this machine, and the results come from the same places: float64,
or the reference. Letters as in `kernels/`.
"""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from afserve.kernels import tiled
from afserve.kernels.formats.eight_bits import KV_DTYPES, rounded
from afserve.kernels.formats.ggml import TYPES, GgmlRows
from afserve.kernels.grouped import Groups, int8_rounded, quantised_groups
from afserve.kernels.native import SELECTIONS
from afserve.kernels.native_fused import SCORINGS
from afserve.kernels.ops import Ops, open_ops
from afserve.kernels.packed import SWIGLU, Gating
from tests.kernels import test_delta, test_ggml, test_int4, test_native_fp8
from tests.kernels import test_native_attention as attention
from tests.kernels import test_native_experts as experts
from tests.kernels import test_native_rows as rows
from tests.kernels.packing import in_bytes

F32, BF16 = torch.float32, torch.bfloat16
CODES = {F32: 0, BF16: 1, torch.int8: 2, torch.int32: 3, torch.int64: 4}
INT8, INT4, FP8 = 2, 4, 6  # how weights are kept, as element.h numbers them
Case = tuple[str, dict[str, Tensor]]
Rows = Callable[[Tensor], Tensor]  # what rows are rounded to, in float64


def case(op: str, bounds: tuple[float, float] = (0.0, 0.0), **values: Tensor | float | bool | None) -> Case:
    """Numbers become tensors of one; whole ones int32."""
    kept = {"bounds": torch.tensor(bounds)}
    for name, value in values.items():
        if isinstance(value, Tensor):
            kept[name] = value.float() if value.dtype is torch.float64 else value
        elif value is not None:
            kept[name] = torch.tensor([value], dtype=F32 if isinstance(value, float) else torch.int32)
    kept["narrow"] = torch.tensor(
        [kept["x" if "x" in kept else "q"].dtype is BF16] if {"x", "q"} & kept.keys() else [0]
    )
    kept["narrow"] = kept["narrow"].int()
    for name in {"want", "want_in_bytes"} & kept.keys():
        kept[name] = kept[name].float()
    return op, kept


def text(value: str) -> bytes:
    return struct.pack("<I", len(value)) + value.encode()


def tensor(x: Tensor) -> bytes:
    sizes = struct.pack(f"<{2 + x.dim()}I", CODES[x.dtype], x.dim(), *x.shape)
    return sizes + x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def save(path: Path, cases: list[Case]) -> None:
    parts = [struct.pack("<I", len(cases))]
    for op, tensors in cases:
        parts += [text(op), struct.pack("<I", len(tensors))]
        parts += [text(name) + tensor(x) for name, x in tensors.items()]
    path.write_bytes(b"".join(parts))


def noise(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def coded(weight_NOI: Tensor, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the weights that these are. Four-bit floats are drawn."""
    if groups.e2m1:
        made = [test_int4.drawn_floats(*weight.shape, groups.size) for weight in weight_NOI]
    else:
        made = [quantised_groups(weight, groups.size) for weight in weight_NOI]
    return (
        torch.stack([one.code_OI for one in made]),
        torch.stack([one.scale_OG for one in made]),
        torch.stack([one.dequantised() for one in made]),
    )


def grouping(groups: Groups) -> dict[str, float]:
    return {"group": groups.size, "wide": groups.wide, "e2m1": groups.e2m1, "kept": INT4}


def wanted(of: Callable[[Rows], Tensor], dtype: torch.dtype, codes: bool) -> dict[str, Tensor]:
    """What comes out of rows as they are, and of rows in bytes, as `neon` has them for codes of few bits."""
    return {"want": of(Tensor.double)} | ({"want_in_bytes": of(in_bytes)} if codes and dtype is BF16 else {})


def product(x_RI: Tensor, weight_OI: Tensor, kept: Groups | int | None, bias_O: Tensor | None = None) -> Case:
    """A dense map of rows; its result in float32 whatever the rows are."""
    bound, beside = {None: 8e-6, INT8: 2e-4}.get(kept if not isinstance(kept, Groups) else INT8, 2e-4), {}
    held, w = weight_OI.float(), weight_OI[None]
    if isinstance(kept, Groups):
        w, scale, held = coded(w, kept)
        held, beside = held[0], {"scale": scale, **grouping(kept)}
    elif kept is INT8:
        held, beside = int8_rounded(weight_OI), {"kept": INT8}
    bias = 0 if bias_O is None else bias_O.double()
    want = wanted(lambda rows: rows(x_RI) @ held.double().T + bias, x_RI.dtype, isinstance(kept, Groups))
    size = want["want"].square().mean().sqrt().item() if want["want"].numel() else 1.0
    return case("linear", (bound * size + 1e-6, 0.0), x=x_RI, w=w, bias=bias_O, **want, **beside)


def stored(x_RI: Tensor, rows: GgmlRows) -> Case:
    """The same with weights of one of ggml's types."""
    numbers = test_ggml.numbers(rows).double()
    want = wanted(lambda rows: rows(x_RI) @ numbers.T, x_RI.dtype, codes=True)
    bound = 2e-4 * want["want"].square().mean().sqrt().item()
    w = rows.bytes_RB.view(torch.int8)[None]
    return case("linear", (bound, 0.0), x=x_RI, w=w, **want, ggml=rows.number)


KEPT = [
    None,
    INT8,
    Groups(32),
    Groups(64, wide=True),
    Groups(1024),
    Groups(32, e2m1=True),
    Groups(96, True, True),
]


def linear() -> Iterator[Case]:
    """One row, few and many; fewer columns than a panel has, as many, and more."""
    for dtype in (F32, BF16):
        for kept in KEPT:
            for outputs, inputs, count in ((64, 64, 1), (100, 33, 5), (192, 480, 40)):
                weight = noise(outputs, inputs, dtype=dtype, seed=1) / inputs**0.5
                yield product(noise(count, inputs, dtype=dtype, seed=2), weight, kept, noise(outputs, seed=3))
        for kind in TYPES:
            for outputs, inputs, count in ((64, 256, 1), (100, 512, 5), (192, 768, 40)):
                yield stored(
                    noise(count, inputs, dtype=dtype, seed=2), test_ggml.drawn(kind, outputs, inputs)
                )


def heads() -> Iterator[Case]:
    """Logits of a vocabulary are the product above; here one map for each head."""
    for dtype, kept in ((F32, None), (BF16, None), (BF16, INT8), (BF16, Groups(32))):
        for count, outputs, inputs in ((3, 40, 33), (2, 128, 64)):
            weight, x = (
                noise(count, outputs, inputs, dtype=dtype) / 8,
                noise(20, count, inputs, dtype=dtype, seed=2),
            )
            held, beside = weight.float(), {}
            if isinstance(kept, Groups):
                weight, scale, held = coded(weight, kept)
                beside = {"scale": scale, **grouping(kept)}
            elif kept:
                held, beside = int8_rounded(weight), {"kept": kept}
            beside |= wanted(
                lambda rows, x=x, held=held: torch.einsum("tai,aoi->tao", rows(x), held.double()),
                dtype,
                isinstance(kept, Groups),
            )
            yield case(
                "heads",
                (1e-5, 1e-5) if dtype is F32 and not kept else (2e-2, 1e-2),
                x=x,
                w=weight,
                **beside,
            )


BANKS = (
    ((5, 100, 40), SWIGLU),
    ((5, 100, 40), experts.GELU),
    ((3, 33, 17), experts.CLAMPED),
    ((2, 288, 160), SWIGLU),
)


def bank(
    shape: tuple[int, int, int], dtype: torch.dtype, kept: Groups | int | None, gating: Gating, count: int
) -> Case:
    """Experts, which have biases where they are clamped."""
    up, down = experts.weights(*shape, dtype)
    clamped = gating.limit is not None
    biases = tuple(noise(*m.shape[:2], seed=8) for m in (up, down)) if clamped else None
    x, beside = noise(count, shape[1], dtype=dtype, seed=count), {}
    slot, weight = experts.routing(count, shape[0], "skipped")
    held_up, held_down = up.float(), down.float()
    if isinstance(kept, Groups):
        (up, up_scale, held_up), (down, down_scale, held_down) = coded(up, kept), coded(down, kept)
        beside = {"up_scale": up_scale, "down_scale": down_scale, **grouping(kept)}
    elif kept:
        held_up, held_down, beside = int8_rounded(up), int8_rounded(down), {"kept": kept}
    if gating.gelu:
        beside["gelu"] = 1
    if biases is not None:
        beside |= {"up_bias": biases[0], "down_bias": biases[1], "limit": gating.limit, "alpha": gating.alpha}
    beside |= wanted(
        lambda rows: experts.exact(x, slot, weight, held_up, held_down, biases, gating, rows),
        dtype,
        isinstance(kept, Groups),
    )
    bounds = (3 * experts.tolerance(dtype if not kept else BF16), 2e-2)
    return case("experts", bounds, x=x, slot=slot, weight=weight, up=up, down=down, **beside)


def expert_ffn() -> Iterator[Case]:
    for dtype in (F32, BF16):
        for kept in (None, INT8, Groups(32), Groups(128), Groups(32, e2m1=True)):
            for shape, gating in BANKS:
                yield from (bank(shape, dtype, kept, gating, count) for count in (1, 33))
    for hidden, inner in test_native_fp8.SHAPES:
        yield from (
            of_blocks(hidden, inner, codes, count) for codes in test_native_fp8.CODES for count in (1, 5, 40)
        )


def of_blocks(hidden: int, inner: int, codes: str, count: int) -> Case:
    """Two experts in FP8 blocks, each for half of the rows."""
    both = [test_native_fp8.expert(hidden, inner, codes, seed) for seed in (0, 9)]
    x = noise(count, hidden, dtype=BF16, seed=2)
    slot = torch.arange(count, dtype=torch.int32)[:, None] % 2
    want = torch.stack([test_native_fp8.exact(x[row : row + 1], both[row % 2])[0] for row in range(count)])
    return case(
        "experts", (4e-3 * want.square().mean().sqrt().item() * 6, 0.0), x=x, slot=slot,
        weight=torch.ones(count, 1), kept=FP8, want=want,
        up=torch.stack([torch.cat((gate.q_OI, up.q_OI)).view(torch.int8) for gate, up, _ in both]),
        up_scale=torch.stack([torch.cat((gate.scale, up.scale)) for gate, up, _ in both]),
        down=torch.stack([down.q_OI.view(torch.int8) for *_, down in both]),
        down_scale=torch.stack([down.scale for *_, down in both]),
    )  # fmt: skip


def norms(truth: Ops) -> Iterator[Case]:
    for dtype in (F32, BF16):
        bounds = (1e-6, 1e-5 if dtype is F32 else 1.6e-2)
        for size in (1, 15, 16, 100, 512):
            x, y, weight = (noise(7, size, dtype=dtype, seed=n) for n in range(3))
            yield case(
                "norms", bounds, x=x, weight=weight[0], eps=1e-6, want=truth.rms_norm(x, weight[0], 1e-6)
            )
            sums = x.clone()
            want = truth.add_rms_norm(sums, y, weight[0], 1e-6)
            yield case("norms", bounds, x=x, y=y, sums=sums, weight=weight[0], eps=1e-6, want=want)
            parts = noise(7, size, seed=3)
            parts[2, size // 2] = float("nan")
            bad = torch.tensor([-1, -1, 3, -1, -1, -1, -1], dtype=torch.int32)
            yield case("sums", x=x, y=parts, bad=bad, want=(x.float() + parts).to(dtype))
            wide = torch.cat((x, y), 1)
            want = torch.nn.functional.silu(x.double()) * y.double()
            yield case("gated", (1e-6, 1e-5 if dtype is F32 else 1e-2), x=wide, want=want)
        yield from turned(truth, dtype)
    for size in (1, 3, 16, 17, 300, 4099):
        x = noise(9, size)
        x[1], x[3, -1] = 0, 9
        index = x.argmax(-1).int()
        x[4, size // 2], index[4] = float("nan"), -1
        yield case("argmax", x=x, index=index)


def turned(truth: Ops, dtype: torch.dtype) -> Iterator[Case]:
    for size in (2, 16, 96):
        for interleaved in (False, True):
            angle = torch.rand(50, size // 2, generator=torch.Generator().manual_seed(1)) * 6
            x, position = noise(4, 3, size, dtype=dtype), torch.tensor([0, 49, 7, 7])
            want = truth.rope(x, angle.cos(), angle.sin(), position, interleaved)
            yield case(
                "rope", (1e-6, 1e-5 if dtype is F32 else 1e-2), x=x, cos=angle.cos(), sin=angle.sin(),
                position=position, interleaved=interleaved, want=want,
            )  # fmt: skip


def router(truth: Ops) -> Iterator[Case]:
    for dtype in (F32, BF16):
        gate = noise(32, 100, dtype=dtype) / 10
        for rule in rows.RULES:
            for bias in (None, noise(32, seed=3)):
                x = noise(9, 100, dtype=dtype, seed=9)
                expert, weight = truth.route(x, gate, bias, rule)
                numbers = [
                    rule.top_k, SCORINGS.index(rule.scoring), SELECTIONS.index(rule.selection), rule.groups,
                    rule.top_groups, rule.renormalise,
                ]  # fmt: skip
                factors = torch.tensor([rule.epsilon, rule.scale, rule.closed_value])
                whole = torch.tensor(numbers, dtype=torch.int32)
                for held in (gate, gate.float()):
                    yield case(
                        "route", (1e-5, 1e-4), x=x, gate=held, bias=bias, rule=whole, factors=factors, expert=expert,
                        want=weight,
                    )  # fmt: skip


def places(batch, block: int) -> Tensor:
    """Where every token that a context reaches lies, in the order of sequences."""
    each = [
        batch.block_table_SB[s, at // block].long() * block + at % block
        for s, context in enumerate(batch.context_S.tolist())
        for at in torch.arange(context)
    ]
    return torch.stack(each)


def integers(batch) -> dict[str, Tensor]:
    return {
        "start": batch.query_start_S1, "context": batch.context_S, "table": batch.block_table_SB,
        "position": batch.position_T, "slot": batch.kv_slot_T,
    }  # fmt: skip


def in_eight(x: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Rows as a cache in 8 bits has them; the first `rank` numbers have a scale of their own."""
    both = [rounded(part, dtype) for part in (x[..., : rank or None], x[..., rank or x.shape[-1] :])]
    return torch.cat([code.view(dtype).float() * scale for code, scale in both], -1)


def attended(lengths, dtype, heads, groups, size, window, block, tiles, rank=0, eight=None) -> Case:
    """With a rank, values are the first so many elements of keys, which have one head. What is wanted in 8 bits is of
    what codes stand for."""
    batch, blocks = attention.paged(lengths, block)
    k, v = (noise(blocks, groups, block, size, dtype=dtype, seed=n) for n in (1, 2))
    v = k[..., :rank] if rank else v
    q = noise(batch.tokens, heads, size, dtype=dtype, seed=3)
    sinks = noise(heads, seed=4) if window == 7 else None
    held = [k, v] if eight is None else [in_eight(x, rank, eight) for x in (k, v)]
    want = attention.exact(
        q, held[0], held[1][..., :rank] if rank else held[1], batch, size**-0.5, window, sinks
    )
    at = places(batch, block)
    rows_of = [cache.transpose(1, 2).reshape(-1, groups, cache.shape[3])[at] for cache in (k, v)]
    return case(
        "attention", (1e-5 if dtype is F32 else 1e-2, 1e-2), q=q, k=rows_of[0], v=rows_of[1], places=at, sinks=sinks,
        want=want, scale=size**-0.5, window=window or 0, block=block, blocks=blocks, tiles=tiles, latent=bool(rank),
        bits=0 if eight is None else 1 + (eight is not torch.int8),
        **integers(batch),
    )  # fmt: skip


def gqa() -> Iterator[Case]:
    for dtype in (F32, BF16):
        for lengths in attention.BATCHES[:4]:
            yield attended(lengths, dtype, 8, 2, 64, None, 16, True)
            yield attended(lengths, dtype, 3, 3, 48, 50, 32, True)
            yield attended(lengths, dtype, 4, 2, 128, 7, 16, True)
            yield attended(lengths, dtype, 3, 3, 40, 50, 16, False)
        for eight in KV_DTYPES.values():
            yield attended(attention.BATCHES[2], dtype, 8, 2, 64, 50, 16, False, eight=eight)


def mla() -> Iterator[Case]:
    for dtype in (F32, BF16):
        for lengths in attention.BATCHES[:4]:
            yield attended(lengths, dtype, 8, 1, 48 + 16, None, 16, False, rank=48)
            yield attended(lengths, dtype, 20, 1, 130 + 10, None, 16, False, rank=130)
        for eight in KV_DTYPES.values():
            yield attended(attention.BATCHES[2], dtype, 8, 1, 48 + 16, None, 16, False, rank=48, eight=eight)


def delta(truth: Ops) -> Iterator[Case]:
    layer, shape = test_delta.layer_of(), test_delta.SHAPE
    whole = torch.tensor(
        [shape.key_heads, shape.value_heads, shape.key, shape.value, shape.taps], dtype=torch.int32
    )
    states, lengths = test_delta.opened(), [8, 13, 0, 0, 3]
    tables, given = (
        [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(5)],
        [test_delta.rows_of(24, n) for n in range(5)],
    )
    for n, length in enumerate(lengths):
        if length:
            chunk = test_delta.batch_of([(0, length, tables[n])])
            truth.delta(test_delta.part(given[n], 0, length), layer, states, chunk)
    spans = [(at, at + more) for at, more in zip(lengths, (1, 1, 11, 1, 9), strict=True)]
    batch = test_delta.batch_of([(*span, tables[n]) for n, span in enumerate(spans)])
    both = test_delta.joined([test_delta.part(given[n], *span) for n, span in enumerate(spans)])
    left = states.clone()
    want = truth.delta(both, layer, left, batch)
    yield case(
        "delta", (1e-5, 1e-4), conv=layer.conv_WC, sizes=whole, mixed=both.mixed_TC, decay=both.decay_TE,
        beta=both.beta_TV, states=states, left=left, want=want, block=test_delta.BLOCK, **integers(batch),
    )  # fmt: skip


def blocks() -> Iterator[Case]:
    for size in (241, 1024, 5000, 16384):
        x = torch.randint(-128, 128, (size,), generator=torch.Generator().manual_seed(size)).to(torch.int8)
        total = xxhash.xxh3_64_intdigest(x.numpy().tobytes(), 7)
        signed = torch.tensor([struct.unpack("<q", struct.pack("<Q", total))[0]])
        yield case("hash", x=x, seed=torch.tensor([7]), sum=signed)
    for dtype in (F32, BF16):
        k, v = (noise(1, 2, 32, size, dtype=dtype, seed=size) for size in (64, 48))
        for rows_1GBD, tiles, layout in zip((k, v), attention.in_tiles(k, v), (1, 2), strict=True):
            assert tiled.layout_of(tiles) == layout
            inside, outside = (x.contiguous().view(-1).view(torch.int8) for x in (tiles, rows_1GBD))
            yield case(
                "moved",
                inside=inside,
                outside=outside,
                layout=layout,
                size=rows_1GBD.shape[3],
                item=dtype.itemsize,
            )


def kernels() -> dict[str, list[Case]]:
    truth = open_ops("cpu", 1, "torch")
    made = {
        "linear": linear(), "linear_heads": heads(), "expert_ffn": expert_ffn(), "norms": norms(truth),
        "router": router(truth), "attend_gqa": gqa(), "attend_mla": mla(), "delta": delta(truth), "blocks": blocks(),
    }  # fmt: skip
    return {name: list(cases) for name, cases in made.items()}
