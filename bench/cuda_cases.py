"""What the CUDA bench times: each Triton op at the sizes that matter, with torch's way to the same result beside it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.kernels.delta import DeltaLayer, DeltaRows, DeltaShape
from afserve.kernels.formats.eight_bits import KV_DTYPES, key_width
from afserve.kernels.formats.scaled import GROUP, BlockScaled
from afserve.kernels.paged import PagedBatch
from afserve.kernels.routing import RouterRule, Scoring, Selection
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.config import ExpertTiles
from afserve.kernels.triton.experts import ExpertWeights, grouped_down, grouped_gate_up
from afserve.kernels.triton.kv import rope_write_kv
from afserve.kernels.triton.latent_prompts import LatentSizes, plan
from afserve.kernels.triton.mla_prompts import attend_prompts
from afserve.kernels.triton.norm import silu_mul
from afserve.kernels.triton.permute import plan_rows
from afserve.kernels.triton.quant import quantise_blocks, quantise_groups
from afserve.kernels.triton.tiles import TileTable
from bench.cuda_clock import Case

BF16 = torch.bfloat16
V3_ROUTER = RouterRule(8, Scoring.SIGMOID, Selection.GROUP_TOP2_SUM, 8, 4, True, 1e-20, 2.5)


def expert_weights(device: torch.device, fp8: bool, experts: int, hidden: int, inner: int) -> ExpertWeights:
    gate_up, down = (
        torch.randn(shape, device=device, dtype=BF16) / shape[2] ** 0.5
        for shape in ((experts, 2 * inner, hidden), (experts, hidden, inner))
    )
    if not fp8:
        return ExpertWeights(gate_up, down)
    h, i = -(-hidden // GROUP), -(-inner // GROUP)
    scales = torch.rand(experts, 2 * i, h, device=device), torch.rand(experts, h, i, device=device)
    return ExpertWeights(gate_up.to(torch.float8_e4m3fn), down.to(torch.float8_e4m3fn), *scales)


def expert_case(
    device: torch.device, fp8: bool, experts: int, rows: int, hidden: int = 7168, inner: int = 2048,
    tiles: ExpertTiles | None = None, weights: ExpertWeights | None = None,
) -> Case:  # fmt: skip
    """The two grouped products and what is fused into them; each of `experts` slots gets `rows` rows."""
    weights = weights or expert_weights(device, fp8, experts, hidden, inner)
    tiles = tiles or TileTable().expert_tiles(weights.kind, rows)
    x = torch.randn(experts * rows, hidden, device=device, dtype=BF16)
    slot = torch.arange(experts, dtype=torch.int32, device=device).repeat_interleave(rows)[:, None]
    plan = plan_rows(slot.contiguous(), experts, tiles.rows)
    q, scale = quantise_groups(x) if fp8 else (x, None)
    weight = torch.ones(experts * rows, 1, device=device)
    ends = torch.arange(rows, experts * rows + 1, rows, dtype=torch.int32, device=device)

    def run() -> Tensor:
        h, h_scale = grouped_gate_up(q, scale, weights, plan, 1, tiles.gate_up)
        return grouped_down(h, h_scale, weights, plan, weight, tiles.down, BF16)

    def peer() -> Tensor:
        h = silu_mul(F.grouped_mm(x, weights.gate_up_EJH.transpose(1, 2), offs=ends))
        return F.grouped_mm(h, weights.down_EHI.transpose(1, 2), offs=ends)

    moved = experts * 3 * hidden * inner * q.element_size() + experts * rows * (
        hidden * (q.element_size() + 2) + 2 * inner * q.element_size()
    )
    kind = "fp8" if fp8 else "bf16"
    flops = 2 * experts * rows * 3 * hidden * inner
    bars = {} if fp8 and rows > 128 else {"of_bound": 0.8 if rows <= 128 else 0.7}
    if fp8:
        return Case("experts", f"{kind} E{experts} rows{rows}", run, moved, flops, kind, None, bars)
    bars["peer_ratio"] = 1.0
    return Case("experts", f"{kind} E{experts} rows{rows}", run, moved, flops, kind, peer, bars)


def linear_case(ops: TritonBackend, rows: int, outputs: int = 7168, inputs: int = 16384) -> Case:
    """A linear map in FP8 blocks, its rows rounded on the way, beside torch's product in bf16; sizes are those of
    DeepSeek-V3's output."""
    x, weight_OI = (torch.randn(n, inputs, device=ops.device, dtype=BF16) for n in (rows, outputs))
    packed = ops.pack_linear_fp8(BlockScaled(*quantise_blocks(weight_OI)), None, BF16)
    return Case(
        "linear fp8", f"{outputs} x {inputs} rows{rows}", lambda: ops.linear(x, packed),
        outputs * inputs + 2 * rows * (inputs + outputs), 2 * rows * outputs * inputs, "fp8",
        lambda: F.linear(x, weight_OI), {"peer_ratio": 1.0},
    )  # fmt: skip


def paged_batch(device: torch.device, sequences: int, queries: int, context: int, block: int) -> PagedBatch:
    blocks = -(-context // block)
    table = torch.randperm(sequences * blocks, device=device, dtype=torch.int32).view(sequences, blocks)
    position = torch.arange(context - queries, context, device=device).repeat(sequences)
    start = torch.arange(0, (sequences + 1) * queries, queries, dtype=torch.int32, device=device)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=device)
    return PagedBatch(position, position, start, lengths, table, queries, context)


def _unpaged(cache_NGBD: Tensor, batch: PagedBatch, shape: tuple[int, ...]) -> Tensor:
    sequences, groups, context, size = shape
    blocks = cache_NGBD[batch.block_table_SB.long()].transpose(1, 2).reshape(sequences, groups, -1, size)
    return blocks[:, :, :context].contiguous()


def gqa_case(
    ops: TritonBackend, sequences: int, queries: int, context: int,
    heads: int = 64, groups: int = 4, size: int = 128, block: int = 64, kv: str = "",
) -> Case:  # fmt: skip
    """torch's peer reads the same keys and values without pages, and of a cache in 8 bits (`kv`) what they were."""
    batch = paged_batch(ops.device, sequences, queries, context, block)
    paged, plain = (batch.block_table_SB.numel(), groups, block, size), (sequences, groups, context, size)
    k, v = (torch.randn(paged, device=ops.device, dtype=BF16) for _ in "kv")
    k_plain, v_plain = (_unpaged(cache, batch, plain) for cache in (k, v))
    if kv:
        whole_k, whole_v = (cache.transpose(1, 2).flatten(0, 1) for cache in (k, v))
        k, v = (
            torch.zeros(*paged[:3], width, device=ops.device, dtype=KV_DTYPES[kv])
            for width in (key_width(size, KV_DTYPES[kv]), size)
        )
        ops.write_kv(whole_k, whole_v, k, v, torch.arange(len(whole_k), device=ops.device))
    q = torch.randn(sequences * queries, heads, size, device=ops.device, dtype=BF16)
    q_dense = q.view(sequences, queries, heads, size).transpose(1, 2)
    seen = queries * context - queries * (queries - 1) // 2
    causal = queries > 1
    assert not causal or queries == context, "the peer's causal mask starts at position 0"
    return Case(
        "gqa prefill" if causal else "gqa decode",
        f"A{heads} G{groups} batch{sequences} context{context}{kv and ' '}{kv}",
        lambda: ops.attend_gqa(q, k, v, batch, size**-0.5, None),
        sequences * groups * context * (k.shape[3] * k.element_size() + size * v.element_size()) + 4 * q.numel(),
        4 * sequences * heads * seen * size, "bf16",
        lambda: F.scaled_dot_product_attention(q_dense, k_plain, v_plain, is_causal=causal, enable_gqa=True),
    )  # fmt: skip


def mla_case(
    ops: TritonBackend,
    sequences: int,
    context: int,
    heads: int,
    rank: int = 512,
    rope: int = 64,
    block: int = 64,
    kv: str = "",
) -> Case:
    batch = paged_batch(ops.device, sequences, 1, context, block)
    cache = torch.randn(batch.block_table_SB.numel(), block, rank + rope, device=ops.device, dtype=BF16)
    if kv:
        rows, shape = cache.flatten(0, 1), (*cache.shape[:2], key_width(rank + rope, KV_DTYPES[kv]))
        cache = torch.zeros(shape, device=ops.device, dtype=KV_DTYPES[kv])
        ops.write_latent(rows, cache, torch.arange(len(rows), device=ops.device), rank)
    q = torch.randn(sequences, heads, rank + rope, device=ops.device, dtype=BF16)
    return Case(
        "mla decode", f"A{heads} batch{sequences} context{context}{kv and ' '}{kv}",
        lambda: ops.attend_mla(q, cache, rank, batch, (rank + rope) ** -0.5),
        cache.element_size() * sequences * context * cache.shape[2] + 2 * sequences * heads * (2 * rank + rope),
        2 * sequences * heads * context * (2 * rank + rope),
        bars={"of_copy": 0.7} if sequences >= 32 else {},
    )  # fmt: skip


def mla_prompt_case(ops: TritonBackend, tokens: int, heads: int, sizes: LatentSizes | None = None) -> Case:
    """A whole prompt whose latents were multiplied up; sizes are DeepSeek-V3's."""
    d, tile = ops.device, ops.tiles.mla_prompt(2)
    of = replace(sizes or LatentSizes(512, 128, 64, 128, 0), queries=tile.queries)
    batch = replace(paged_batch(d, 1, tokens, tokens, 64), starts=(0, tokens), contexts=(tokens,))
    found = plan(batch, of, 64)
    assert found is not None, f"{tokens} tokens are absorbed"
    q, turned = (torch.randn(tokens, heads, n, device=d, dtype=BF16) for n in (of.nope, of.rope))
    k, v = (torch.randn(heads, tokens, n, device=d, dtype=BF16) for n in (of.nope, of.value))
    latent = torch.randn(tokens, of.rank + of.rope, device=d, dtype=BF16)
    out, tiles = torch.empty(tokens, heads, of.value, device=d, dtype=BF16), found.prompts[0].tile_N4
    seen = tokens * (tokens + 1) // 2
    return Case(
        "mla prefill", f"A{heads} T{tokens}",
        lambda: attend_prompts(q, turned, k, v, latent, 0, tiles, 0.07, tile, out),
        2 * (q.numel() + turned.numel() + k.numel() + v.numel() + out.numel()),
        2 * heads * seen * (of.nope + of.rope + of.value), "bf16",
    )  # fmt: skip


SMALL = ("route", "rms_norm", "add_rms_norm", "quantise_groups", "rope_write_kv")


def small_case(ops: TritonBackend, op: str, tokens: int, hidden: int = 7168, experts: int = 256) -> Case:
    """One of the ops that a layer runs besides, by the bytes it moves."""
    d = ops.device
    if op == "rope_write_kv":
        return _rope_case(ops, tokens)
    x, y, weight = (torch.randn(*s, hidden, device=d, dtype=BF16) for s in ((tokens,), (tokens,), ()))
    gate, bias = torch.randn(experts, hidden, device=d, dtype=BF16), torch.randn(experts, device=d)
    run: Callable[[], object]
    run, moved = {
        "route": (lambda: ops.route(x, gate, bias, V3_ROUTER), 2 * (x.numel() + gate.numel())),
        "rms_norm": (lambda: ops.rms_norm(x, weight, 1e-6), 4 * x.numel()),
        "add_rms_norm": (lambda: ops.add_rms_norm(x, y, weight, 1e-6), 8 * x.numel()),
        "quantise_groups": (lambda: quantise_groups(x), 3 * x.numel()),
    }[op]
    return Case(op, f"T{tokens}", run, moved)


def _rope_case(ops: TritonBackend, tokens: int) -> Case:
    d = ops.device
    q, k, v = (torch.randn(tokens, n, 128, device=d, dtype=BF16) for n in (64, 4, 4))
    k_cache, v_cache = (torch.zeros(-(-tokens // 64), 4, 64, 128, device=d, dtype=BF16) for _ in range(2))
    at, angle = torch.arange(tokens, device=d), torch.rand(tokens, 64, device=d)
    return Case(
        "rope_write_kv", f"T{tokens}",
        lambda: rope_write_kv(q, k, v, angle, angle, at, k_cache, v_cache, at, False),
        4 * (q.numel() + k.numel() + v.numel()) + 8 * angle.numel(),
    )  # fmt: skip


def states_case(ops: TritonBackend, sequences: int, tokens: int = 1) -> Case:
    """Qwen3-Next's layer with states between its projections: tokens of sequences, whose states are their own, in
    blocks of 3,216; prompts begin the sequences."""
    d, shape, count, block = ops.device, DeltaShape(16, 32, 128, 128, 4), sequences * tokens, 3216
    rows = DeltaRows(
        torch.randn(count, shape.channels, device=d, dtype=BF16),
        -torch.rand(count, 32, device=d), torch.rand(count, 32, device=d),
    )  # fmt: skip
    state = torch.zeros(sequences * -(-tokens // block), shape.numbers, device=d)
    layer = DeltaLayer(shape, torch.randn(4, shape.channels, device=d))
    batch = paged_batch(d, sequences, tokens, max(2, tokens), block)
    starts = tuple(range(0, count + 1, tokens))
    batch = replace(batch, starts=starts, contexts=(max(2, tokens),) * sequences)
    run = partial(ops.delta, rows, layer, state, block, batch)
    name = f"prompt T{tokens}" if tokens > 1 else f"decode batch{sequences}"
    return Case("states", name, run, 8 * state.numel() + 2 * rows.mixed_TC.numel())


@dataclass(frozen=True)
class Planned:
    """A case that is not built yet: what it holds is allocated when its turn comes, and may fail then."""

    name: str
    build: Callable[[], Case]


class Experts:
    """DeepSeek-V3's expert in bf16 or FP8; the weights of the last (kind, number) are kept for the next case."""

    def __init__(self, device: torch.device, hidden: int = 7168, inner: int = 2048) -> None:
        self._device, self._hidden, self._inner = device, hidden, inner
        self._known: tuple[bool, int] | None = None
        self._weights: ExpertWeights | None = None

    def case(self, fp8: bool, experts: int, rows: int, tiles: ExpertTiles | None = None) -> Case:
        if self._known != (fp8, experts):
            self._weights = None  # freed before the next are made
            self._weights = expert_weights(self._device, fp8, experts, self._hidden, self._inner)
            self._known = (fp8, experts)
        return expert_case(self._device, fp8, experts, rows, self._hidden, self._inner, tiles, self._weights)


def groups(ops: TritonBackend) -> dict[str, list[Planned]]:
    """What is measured, by group: each group has a process of its own."""
    experts = Experts(ops.device)
    has_fp8 = ops.holds_fp8(torch.bfloat16)
    kinds = (False, True) if has_fp8 else (False,)
    eight = [name for name in KV_DTYPES if has_fp8 or name != "fp8"]
    maps = [(7168, 16384), (24576, 1536), (2112, 7168)] if has_fp8 else []
    found: dict[str, list[Planned]] = {
        "experts": [
            Planned(f"{'fp8' if fp8 else 'bf16'} E{n} rows{rows}", partial(experts.case, fp8, n, rows))
            for fp8, n in product(kinds, (8, 16, 32, 64))
            for rows in (1, 2, 4, 8, 16, 32, 64, 128, *([4096] if n == 8 else []))
        ],
        "mla": [
            Planned(f"A{heads} batch{batch}", partial(mla_case, ops, batch, 4096, heads))
            for heads, batch in product((16, 128), (1, 32, 64, 128))
        ]
        + [Planned(f"A128 batch64 {kv}", partial(mla_case, ops, 64, 4096, 128, kv=kv)) for kv in eight],
        "gqa": [
            Planned(f"batch{batch} context{context}", partial(gqa_case, ops, batch, 1, context))
            for batch, context in product((1, 8, 32, 64), (128, 1024, 4096, 8192))
        ]
        + [Planned(f"batch32 context4096 {kv}", partial(gqa_case, ops, 32, 1, 4096, kv=kv)) for kv in eight],
        "linear": [
            Planned(f"fp8 {outputs} x {inputs} rows{rows}", partial(linear_case, ops, rows, outputs, inputs))
            for (outputs, inputs), rows in product(maps, (1, 16, 64, 128, 4096))
        ],
        "prefill": [
            *(Planned(f"T{n}", partial(gqa_case, ops, 1, n, n)) for n in (1024, 8192)),
            *(Planned(f"mla T{n}", partial(mla_prompt_case, ops, n, 128)) for n in (1024, 8192)),
        ],
        "states": [
            *(Planned(f"decode batch{n}", partial(states_case, ops, n)) for n in (1, 32, 128)),
            *(Planned(f"prompt T{n}", partial(states_case, ops, 1, n)) for n in (512, 2048, 8192)),
        ],
        "small": [
            Planned(f"{op} T{tokens}", partial(small_case, ops, op, tokens))
            for tokens, op in product((1, 128, 4096), SMALL)
        ],
    }
    return found
