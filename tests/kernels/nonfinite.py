"""What every backend must do with values that are not finite: rows that meet one are lost, the others keep their bits.

Each check plants a value in one tensor and compares with the same call without it. The rows that may not change are
the ones that do not depend on that tensor's element; the others must come out as something that is not finite.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from afserve.kernels.cache import LayerShape
from afserve.kernels.formats.scaled import quantised_blocks
from afserve.kernels.layer import GqaLayer, PreparedGqa
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedExperts
from afserve.kernels.paged import PagedBatch
from afserve.kernels.routing import RouterRule, Scoring, Selection

VALUES = (torch.nan, torch.inf, -torch.inf)
RULES = (
    RouterRule(3, Scoring.SOFTMAX, renormalise=True),
    RouterRule(2, Scoring.TOPK_SOFTMAX),
    RouterRule(3, Scoring.SIGMOID, Selection.GROUP_TOP2_SUM, 4, 2, True, 1e-20, 2.5),
    RouterRule(2, Scoring.SOFTMAX, Selection.GROUP_MAX, 4, 1, closed_value=float("-inf")),
)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5
    return made.to(dtype).to(device)


def planted(x: Tensor, at: tuple[int, ...], value: float) -> Tensor:
    with_it = x.clone()
    with_it[at] = value
    return with_it


def finite_rows(x: Tensor) -> list[bool]:
    return x.flatten(1).isfinite().all(-1).tolist()


def only_lost(clean: Tensor, got: Tensor, lost: set[int]) -> None:
    assert finite_rows(clean) == [True] * len(clean)
    for row in range(len(clean)):
        if row in lost:
            assert not got[row].isfinite().all(), f"row {row} hides what it met"
        else:
            assert torch.equal(got[row], clean[row]), f"row {row} met nothing"


def check_add_sums(ops: Ops, dtype: torch.dtype, value: float) -> None:
    for size in (1, 17, 64, 100, 1500):
        for y_dtype in (torch.float32, dtype):
            x, y = noise((7, size), dtype, 0, ops.device), noise((7, size), y_dtype, 1, ops.device)
            clean = x.clone()
            ops.add_sums(clean, y)
            mine, addend = planted(x, (5, 0), value), planted(y, (2, size - 1), value)
            bad = torch.tensor([-1, -1, -1, 0, -1, 2, -1], dtype=torch.int32, device=ops.device)
            ops.add_sums(mine, addend, bad, 4)
            only_lost(clean, mine, {2, 5})
            assert bad.tolist() == [-1, -1, 4, 0, -1, 2, -1]


def check_sums_that_overflow(ops: Ops, dtype: torch.dtype) -> None:
    """The edge of bfloat16 is a rounding: half a step above its largest value is infinity, less is not."""
    most = torch.finfo(dtype).max
    above = float.fromhex("0x1.ffp127") if dtype is torch.bfloat16 else most
    x = torch.full((4, 40), most, dtype=dtype, device=ops.device)
    x[2:] = 0
    y = torch.zeros(4, 40, device=ops.device)
    y[1, 3], y[2, 39], y[3, 17] = most, above if dtype is torch.bfloat16 else torch.inf, 1e-45
    bad = torch.full((4,), -1, dtype=torch.int32, device=ops.device)
    ops.add_sums(x, y, bad, 9)
    assert bad.tolist() == [-1, 9, 9, -1] and finite_rows(x) == [True, False, False, True]


def check_argmax(ops: Ops, value: float) -> None:
    for size in (1, 15, 16, 33, 64, 4099):
        logits = noise((6, size), torch.float32, size, ops.device)
        clean = ops.argmax(logits).tolist()
        assert clean == logits.argmax(-1).tolist()
        for at in {0, size // 2, size - 1}:
            assert ops.argmax(planted(logits, (3, at), value)).tolist() == [*clean[:3], -1, *clean[4:]]


def check_route(ops: Ops, dtype: torch.dtype, value: float, rule: RouterRule) -> None:
    tokens, hidden, experts = 11, 72, 16
    x, gate = noise((tokens, hidden), dtype, 0, ops.device), noise((experts, hidden), dtype, 1, ops.device)
    bias = noise((experts,), torch.float32, 2, ops.device)
    clean = ops.route(x, gate, bias, rule)

    def check(lost: set[int], x: Tensor, gate: Tensor, bias: Tensor) -> None:
        expert, weight = ops.route(x, gate, bias, rule)
        assert int(expert.min()) >= 0 and int(expert.max()) < experts
        for t in range(tokens):
            if t in lost:
                assert expert[t].tolist() == list(range(rule.top_k)) and weight[t].isnan().all()
            else:
                assert torch.equal(expert[t], clean[0][t]) and torch.equal(weight[t], clean[1][t])

    everyone = set(range(tokens))
    check({4}, planted(x, (4, 70), value), gate, bias)
    check(everyone, x, planted(gate, (15, 3), value), bias)


def check_bias(ops: Ops, dtype: torch.dtype, rule: RouterRule) -> None:
    """NaN allows no choice; minus infinity closes an expert and harms nobody."""
    x, gate = noise((5, 64), dtype, 0, ops.device), noise((16, 64), dtype, 1, ops.device)
    bias = torch.zeros(16, device=ops.device)
    expert, weight = ops.route(x, gate, planted(bias, (6,), torch.nan), rule)
    assert expert.tolist() == [list(range(rule.top_k))] * 5 and weight.isnan().all()
    first = int(ops.route(x, gate, bias, rule)[0][0, 0])
    expert, weight = ops.route(x, gate, planted(bias, (first,), -torch.inf), rule)
    assert weight.isfinite().all() and int(expert.min()) >= 0 and int(expert.max()) < 16
    if rule.selection is Selection.PLAIN:
        assert first not in expert.tolist()[0]


def check_rows(ops: Ops, dtype: torch.dtype, value: float) -> None:
    """Norms, dense products and the head: a row is lost by its own values only, all by a weight's."""
    hidden, inner, rows = 72, 40, 19
    x, norm = noise((rows, hidden), dtype, 0, ops.device), 1 + noise((hidden,), dtype, 1, ops.device)
    weight, bias = noise((inner, hidden), dtype, 2, ops.device), noise((inner,), dtype, 3, ops.device)
    gate_up, down = (
        noise((2 * inner, hidden), dtype, 4, ops.device),
        noise((hidden, inner), dtype, 5, ops.device),
    )
    everyone, odd = set(range(rows)), planted(x, (17, 70), value)

    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.linear(x, ops.pack_linear(weight, bias))

    def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return ops.mlp(x, ops.pack_linear(gate_up), ops.pack_linear(down))

    only_lost(linear(x, weight, bias), linear(odd, weight, bias), {17})
    only_lost(linear(x, weight, bias), linear(x, planted(weight, (39, 71), value), bias), everyone)
    only_lost(linear(x, weight, bias), linear(x, weight, planted(bias, (39,), value)), everyone)
    only_lost(ops.logits(x, ops.pack_linear(weight)), ops.logits(odd, ops.pack_linear(weight)), {17})
    only_lost(mlp(x, gate_up, down), mlp(odd, gate_up, down), {17})
    only_lost(mlp(x, gate_up, down), mlp(x, planted(gate_up, (3, 3), value), down), everyone)
    only_lost(ops.rms_norm(x, norm, 1e-6), ops.rms_norm(planted(x, (17, 70), torch.nan), norm, 1e-6), {17})
    only_lost(ops.rms_norm(x, norm, 1e-6), ops.rms_norm(x, planted(norm, (71,), value), 1e-6), everyone)


def check_experts(
    ops: Ops,
    pack: Callable[[Tensor, Tensor], PackedExperts],
    dtype: torch.dtype,
    value: float,
    rows: int = 37,
) -> None:
    experts, hidden, inner = 4, 72, 40
    up, down = (
        noise((experts, 2 * inner, hidden), dtype, 0, ops.device),
        noise((experts, hidden, inner), dtype, 1, ops.device),
    )
    x = noise((rows, hidden), dtype, 2, ops.device)
    slot = torch.arange(2 * rows, device=ops.device).int().view(rows, 2) * 3 % experts
    slot[::5, 1] = -1
    weight = torch.rand(rows, 2, generator=torch.Generator().manual_seed(3)).to(ops.device) + 0.1

    def ffn(x: Tensor, up: Tensor, down: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros(rows, hidden, device=ops.device)
        ops.expert_ffn(x, slot, weight, pack(up, down), out)
        return out

    clean = ffn(x, up, down, weight)
    meet = {r for r in range(rows) if 2 in slot[r].tolist()}
    assert 0 < len(meet) < rows
    for at in ((2, 0, 0), (2, 2 * inner - 1, hidden - 1)):
        only_lost(clean, ffn(x, planted(up, at, value), down, weight), meet)
    only_lost(clean, ffn(x, up, planted(down, (2, hidden - 1, inner - 1), value), weight), meet)
    only_lost(clean, ffn(planted(x, (8, hidden - 1), value), up, down, weight), {8})
    only_lost(clean, ffn(x, up, down, planted(weight, (7, 0), value)), {7})


def pack_fp8(ops: Ops, up: Tensor, down: Tensor) -> PackedExperts:
    """Slots of e4m3 blocks; what is not finite becomes so in its block's bytes or in its scale."""
    experts, hidden, inner = down.shape
    packed = ops.empty_experts(experts, hidden, inner, down.dtype, fp8=True)
    for slot in range(experts):
        blocks = (quantised_blocks(w) for w in (*up[slot].chunk(2), down[slot]))
        ops.set_expert_fp8(packed, slot, *blocks)
    return packed


# (new tokens, context) of each sequence; contexts end inside blocks, tiles and windows, and beyond the split of 512.
LONG = ((1, 37), (1, 130), (3, 83), (1, 700), (2, 18), (1, 9))
SHORT = ((1, 37), (3, 21), (1, 9))  # for an interpreter
Lengths = Sequence[tuple[int, int]]


def paged(ops: Ops, block: int, lengths: Lengths) -> PagedBatch:
    """Sequences one after the other in the cache, one free block behind each."""
    position, slot, table, used = [], [], [], 0
    width = max(-(-context // block) for _, context in lengths) + 1
    for new, context in lengths:
        count = -(-context // block)
        table.append([*range(used, used + count), *[used + count] * (width - count)])
        position += range(context - new, context)
        slot += [(used + p // block) * block + p % block for p in range(context - new, context)]
        used += count + 1
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0)
    contexts = torch.tensor([context for _, context in lengths])
    made = (
        torch.tensor(position), torch.tensor(slot), starts.int(), contexts.int(), torch.tensor(table).int(),
    )  # fmt: skip
    most = max(context for _, context in lengths)
    return PagedBatch(*(t.to(ops.device) for t in made), max(new for new, _ in lengths), most)


def tokens_of(batch: PagedBatch, sequence: int) -> set[int]:
    starts = batch.query_start_S1.tolist()
    return set(range(starts[sequence], starts[sequence + 1]))


def first_slot(batch: PagedBatch, sequence: int, block: int) -> int:
    """Where the first of a sequence's new tokens lies: all of them see it."""
    position = int(batch.position_T[min(tokens_of(batch, sequence))])
    return int(batch.block_table_SB[sequence, position // block]) * block + position % block


def unseen(batch: PagedBatch, block: int, window: int | None) -> tuple[Tensor, int]:
    """Slots of the cache that no token of the batch sees, and how many slots there are."""
    starts, contexts = batch.query_start_S1.tolist(), batch.context_S.tolist()
    blocks = int(batch.block_table_SB.max()) + 1
    free = torch.ones(blocks * block, dtype=torch.bool)
    for s, context in enumerate(contexts):
        first = 0 if window is None else max(0, context - (starts[s + 1] - starts[s]) - window + 1)
        for p in range(first, context):
            free[int(batch.block_table_SB[s, p // block]) * block + p % block] = False
    return free.nonzero()[:, 0], blocks


def copied(cache: Sequence[Tensor], kept: Sequence[Tensor]) -> Sequence[Tensor]:
    """`cache` with what `kept` has, which was written once: an interpreter takes most of a check's time to write."""
    for mine, theirs in zip(cache, kept, strict=True):
        mine.copy_(theirs)
    return cache


def changed(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Slots in which the tensors of a pair differ; NaN differs from everything."""
    different = torch.stack([(mine != theirs).flatten(1).any(-1) for mine, theirs in pairs])
    return different.any(0).nonzero()[:, 0]


def check_gqa(
    ops: Ops,
    dtype: torch.dtype,
    value: float,
    *,
    heads: int = 4,
    size: int = 48,
    window: int | None = None,
    lengths: Lengths = LONG,
) -> None:
    block, groups = 16, 2
    batch = paged(ops, block, lengths)
    stale, blocks = unseen(batch, block, window)
    q = noise((batch.tokens, heads, size), dtype, 0, ops.device)
    k, v = (noise((blocks * block, groups, size), dtype, seed, ops.device) for seed in (1, 2))

    kept = ops.empty_kv(blocks, groups, block, (size, size), dtype)
    ops.write_kv(k, v, *kept, torch.arange(blocks * block, device=ops.device))

    def attend(q: Tensor, mine_k: Tensor, mine_v: Tensor) -> Tensor:
        cache = copied(ops.empty_kv(blocks, groups, block, (size, size), dtype), kept)
        at = changed((mine_k, k), (mine_v, v))
        if at.numel():
            ops.write_kv(mine_k[at], mine_v[at], *cache, at)
        return ops.attend_gqa(q, *cache, batch, 0.3, window)

    clean = attend(q, k, v)
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[stale.to(ops.device)] = value
    dirty_v[stale.to(ops.device)] = value
    only_lost(clean, attend(q, dirty_k, dirty_v), set())
    only_lost(clean, attend(planted(q, (3, 1, 5), torch.nan), dirty_k, dirty_v), {3})
    for s in range(len(lengths)):
        slot = first_slot(batch, s, block)
        only_lost(clean, attend(q, planted(k, (slot,), torch.nan), v), tokens_of(batch, s))
        only_lost(clean, attend(q, k, planted(v, (slot,), value)), tokens_of(batch, s))


def check_mla(ops: Ops, dtype: torch.dtype, value: float, lengths: Lengths = LONG) -> None:
    block, heads, rank, wide = 16, 5, 40, 56
    batch = paged(ops, block, lengths)
    stale, blocks = unseen(batch, block, None)
    q = noise((batch.tokens, heads, wide), dtype, 0, ops.device)
    latent = noise((blocks * block, wide), dtype, 1, ops.device)

    kept = ops.empty_cache((blocks, block, wide), dtype)
    ops.write_latent(latent, kept, torch.arange(blocks * block, device=ops.device))

    def attend(q: Tensor, mine: Tensor) -> Tensor:
        (cache,) = copied([ops.empty_cache((blocks, block, wide), dtype)], [kept])
        at = changed((mine, latent))
        if at.numel():
            ops.write_latent(mine[at], cache, at)
        return ops.attend_mla(q, cache, rank, batch, 0.3)

    clean, dirty = attend(q, latent), latent.clone()
    dirty[stale.to(ops.device)] = value
    only_lost(clean, attend(q, dirty), set())
    only_lost(clean, attend(planted(q, (3, 1, 55), torch.nan), dirty), {3})
    for s in range(len(lengths)):
        slot = first_slot(batch, s, block)
        only_lost(clean, attend(q, planted(latent, (slot,), torch.nan)), tokens_of(batch, s))
    up = noise((heads, 24, rank), dtype, 4, ops.device)
    only_lost(
        ops.linear_heads(clean, ops.pack_heads(up)),
        ops.linear_heads(planted(clean, (2, 4, 39), value), ops.pack_heads(up)),
        {2},
    )


HIDDEN, HEADS, GROUPS, SIZE, EXPERTS = 96, 4, 2, 32, 8
PLANTS = ("input_norm_H", "qkv", "q_norm_D", "k_norm_D", "out", "post_norm_H", "gate_EH", "bias_E")


def weights(dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    return {
        "input_norm_H": 1 + noise((HIDDEN,), dtype, 0, device),
        "qkv": noise(((HEADS + 2 * GROUPS) * SIZE, HIDDEN), dtype, 1, device),
        "q_norm_D": 1 + noise((SIZE,), dtype, 2, device),
        "k_norm_D": 1 + noise((SIZE,), dtype, 3, device),
        "out": noise((HIDDEN, HEADS * SIZE), dtype, 4, device),
        "post_norm_H": 1 + noise((HIDDEN,), dtype, 5, device),
        "gate_EH": noise((EXPERTS, HIDDEN), dtype, 6, device),
        "bias_E": noise((EXPERTS,), torch.float32, 7, device),
    }


def layer(ops: Ops, held: dict[str, Tensor]) -> PreparedGqa:
    angle = torch.rand(800, SIZE // 2, generator=torch.Generator().manual_seed(8)).to(ops.device) * 6
    return ops.prepare_gqa(
        GqaLayer(
            held["input_norm_H"], ops.pack_linear(held["qkv"]), held["q_norm_D"], held["k_norm_D"], angle.cos(),
            angle.sin(), ops.pack_linear(held["out"]), held["post_norm_H"], held["gate_EH"], held["bias_E"],
            RouterRule(2, Scoring.SIGMOID, renormalise=True), HEADS, GROUPS, SIZE, 1e-6, SIZE**-0.5,
        )
    )  # fmt: skip


def check_half(ops: Ops, dtype: torch.dtype, value: float, lengths: Lengths = LONG) -> None:
    """The fused half: a sequence's own rows are lost, or all by a weight; experts' ids stay ids."""
    batch = paged(ops, 16, lengths)
    blocks = int(batch.block_table_SB.max()) + 1
    x, held = noise((batch.tokens, HIDDEN), dtype, 9, ops.device), weights(dtype, ops.device)
    context = [noise((blocks * 16, GROUPS, SIZE), dtype, seed, ops.device) for seed in (10, 11)]
    kept = ops.empty_kv(blocks, GROUPS, 16, (SIZE, SIZE), dtype)
    ops.write_kv(*context, *kept, torch.arange(blocks * 16, device=ops.device))

    def run(x: Tensor, held: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        cache = copied(ops.empty_kv(blocks, GROUPS, 16, (SIZE, SIZE), dtype), kept)
        stream = x.clone()
        half = ops.gqa_half(stream, ops.bind_gqa(layer(ops, held), *cache), batch)
        assert half.expert_TK is not None and half.weight_TK is not None
        assert int(half.expert_TK.min()) >= 0 and int(half.expert_TK.max()) < EXPERTS
        return stream, half.normed_TH, half.weight_TK, half.expert_TK

    clean = run(x, held)
    everyone = set(range(batch.tokens))
    several = next(s for s, (new, _) in enumerate(lengths) if new > 1)
    got = run(planted(x, (min(tokens_of(batch, several)), 95), value), held)
    for mine, right in zip(got[:3], clean[:3], strict=True):
        only_lost(right, mine, tokens_of(batch, several))
    for name in PLANTS:
        if name == "bias_E":
            tensor = planted(held[name], (3,), torch.nan)
        else:
            tensor = planted(held[name], tuple(n - 1 for n in held[name].shape), value)
        stream, normed, weight, expert = run(x, replace_one(held, name, tensor))
        assert weight.isnan().all() and expert.tolist() == [[0, 1]] * batch.tokens, name
        if name not in ("gate_EH", "bias_E"):
            only_lost(clean[1], normed, everyone)
        if name not in ("gate_EH", "bias_E", "post_norm_H"):
            only_lost(clean[0], stream, everyone)


def replace_one(held: dict[str, Tensor], name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {**held, name: tensor}


def check_clear_blocks(ops: Ops, dtype: torch.dtype) -> None:
    tokens = torch.arange(6 * 16, device=ops.device)
    batch = replace(paged(ops, 16, SHORT), kv_slot_T=tokens)
    k, v = (noise((96, 2, 32), dtype, seed, ops.device) for seed in (1, 2))
    opened = ops.open_cache([LayerShape(2, 32, 32), LayerShape(1, 24)], 6, 16, dtype)
    cache, (latent,) = opened.layers
    ops.write_kv(k, v, *cache, batch.kv_slot_T)
    opened.clear_blocks(0, [4, 1])
    opened.clear_blocks(0, [])
    kept = ops.empty_kv(6, 2, 16, (32, 32), dtype)
    rest = tokens[(tokens // 16 != 1) & (tokens // 16 != 4)]
    ops.write_kv(k[rest], v[rest], *kept, rest)
    for got, wanted in zip(cache, kept, strict=True):
        assert torch.equal(got, wanted) and got.any()
    latent += 1
    opened.clear_blocks(1, (5,))
    assert not latent[5].any() and latent[:5].all()
