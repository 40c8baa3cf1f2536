"""Rows of a KV cache in 8 bits: how far they are from what they were made of, their bytes, and attention over them."""

from collections.abc import Sequence

import pytest
import torch

from afserve.kernels.cache import LayerShape, StateShape
from afserve.kernels.formats.eight_bits import KV_DTYPES, latents_at, pair_at
from afserve.kernels.ops import Ops, open_ops
from afserve.kernels.paged import PagedBatch
from afserve.spec_parts import AttentionSpec

pytestmark = pytest.mark.by_day(2)

BLOCK, BLOCKS = 16, 6
SHAPES = [(2, 64), (1, 32), (3, 24), (2, 80), (4, 128)]  # heads and their size
CUTS = [
    (1, 1, 60),
    (17, 40, 57),
    (33, 1, 3),
]  # new tokens of each of three sequences, which have 60, 57 and 33
ERROR = {"int8": 1 / 254, "fp8": 1 / 16}  # at most, of the largest number and of a number


@pytest.fixture(params=KV_DTYPES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_numbers_are_near_and_strange_rows_stay_strange(kind: str) -> None:
    ops, dtype = open_ops("cpu", 1, "torch"), KV_DTYPES[kind]
    k, v = rows(BLOCK, 2, 40) * 9, rows(BLOCK, 2, 24, seed=1)  # keys may be wider
    k[0, 0], k[1, 0, 3], v[2, 1, 5], v[3, 0] = 0.0, torch.nan, torch.inf, 1e-44
    cache = ops.open_cache([LayerShape(2, 40, 24)], BLOCKS, BLOCK, dtype).layers[0]
    ops.write_kv(k, v, *cache, torch.arange(BLOCK) + BLOCK)
    kept = [x[0].transpose(0, 1) for x in pair_at(*cache, torch.tensor([1]))]
    assert kept[0][1, 0].isnan().all() and kept[1][2, 1].isnan().all() and not kept[0][0, 0].any()
    for given, found in zip((k, v), kept, strict=True):
        fine = given.isfinite().all(-1)
        error, most = (given - found)[fine].abs(), given[fine].abs().amax(-1, keepdim=True)
        bound = (
            most * ERROR["int8"] if kind == "int8" else given[fine].abs() * ERROR["fp8"] + most / (1 << 18)
        )
        assert (error <= bound * 1.001 + 1e-40).all()


def test_a_latent_and_its_rotary_key_are_scaled_apart(kind: str) -> None:
    ops, dtype = open_ops("cpu", 1, "torch"), KV_DTYPES[kind]
    latent = torch.cat((rows(BLOCK, 32) / 100, rows(BLOCK, 8, seed=1) * 100), 1)
    (cache,) = ops.open_cache([LayerShape(1, 40)], BLOCKS, BLOCK, dtype).layers[0]
    ops.write_latent(latent, cache, torch.arange(BLOCK), 32)
    found = latents_at(cache, torch.tensor([0]), 32)[0]
    for part in (slice(0, 32), slice(32, 40)):
        most = latent[:, part].abs().amax(-1, keepdim=True)
        assert ((latent - found)[:, part].abs() <= most / (250 if kind == "int8" else 15)).all()


@pytest.mark.parametrize(
    ("attention", "ratio"),
    [
        (AttentionSpec("gqa", 64, 8, 256, 256, None), 0.508),
        (AttentionSpec("gqa", 32, 4, 128, 128, None), 0.516),
        (AttentionSpec("gqa", 64, 8, 64, 64, None), 0.531),
        (AttentionSpec("mla", 128, 1, 192, 128, None, kv_lora_rank=512, rope_dim=64, nope_dim=128), 0.507),
    ],
)
def test_bytes_of_a_token(attention: AttentionSpec, ratio: float) -> None:
    """What moves, is copied, and lies in tiers, beside bfloat16."""
    assert attention.kv_bytes(1) / attention.kv_bytes(2) == pytest.approx(ratio, abs=5e-4)


def test_states_stay_whole(kind: str) -> None:
    for numbers, size in ((33, 16), (100, 1), (7, 48)):
        shape = StateShape(numbers)
        (cache,) = open_ops("cpu", 1, "torch").open_cache([shape], 3, size, KV_DTYPES[kind]).layers[0]
        states = shape.of_blocks(cache)
        states.copy_(rows(3, numbers))
        assert torch.equal(shape.of_blocks(cache), rows(3, numbers))


def batch_of(counts: tuple[int, int, int], contexts: tuple[int, ...] = (60, 57, 33)) -> PagedBatch:
    """The last tokens of three sequences whose blocks lie mixed."""
    table = torch.tensor([[5, 0, 3, 8], [1, 7, 2, 9], [4, 6, 10, 0]], dtype=torch.int32)
    counts = tuple(min(pair) for pair in zip(counts, contexts, strict=True))  # type: ignore[assignment]
    position = [c - n + i for n, c in zip(counts, contexts, strict=True) for i in range(n)]
    which = [s for s, n in enumerate(counts) for _ in range(n)]
    slot = [int(table[s, p // BLOCK]) * BLOCK + p % BLOCK for s, p in zip(which, position, strict=True)]
    start = torch.tensor([0, *counts]).cumsum(0).int()
    return PagedBatch(
        torch.tensor(position), torch.tensor(slot), start, torch.tensor(contexts, dtype=torch.int32), table,
        max(counts), max(contexts),
    )  # fmt: skip


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "size"), SHAPES)
def test_attention_is_that_over_the_widened_rows(
    groups: int, size: int, compute: torch.dtype, kind: str, ops: Ops
) -> None:
    """Within the roundings of the queries' dtype; and a token has the same bits alone and among others."""
    whole, exact = batch_of((60, 57, 33)), open_ops("cpu", 1, "torch")
    k, v, q = (rows(150, n, size, seed=n).to(compute) for n in (groups, groups, 2 * groups))
    kept = ops.open_cache([LayerShape(groups, size, size)], 11, BLOCK, KV_DTYPES[kind])
    ops.write_kv(k, v, *kept.layers[0], whole.kv_slot_T)
    plain = exact.open_cache([LayerShape(groups, size, size)], 11, BLOCK, KV_DTYPES[kind])
    exact.write_kv(k, v, *plain.layers[0], whole.kv_slot_T)
    assert torch.equal(kept.read(range(11)), plain.read(range(11))), "the bytes of a block mean the same"
    wide = [x.contiguous() for x in pair_at(*plain.layers[0], torch.arange(11))]
    for window, sink in ((None, None), (20, rows(2 * groups))):
        seen = ops.attend_gqa(q, *kept.layers[0], whole, size**-0.5, window, sink)
        wanted = exact.attend_gqa(q.float(), *wide, whole, size**-0.5, window, sink)
        torch.testing.assert_close(seen.float(), wanted, **TOLERANCE[compute])
        for counts in CUTS if ops.backend_name == "native" else ():
            part = batch_of(counts)
            at = [i for s, n in enumerate(counts) for i in range(ENDS[s] - min(n, LENGTHS[s]), ENDS[s])]
            assert torch.equal(
                ops.attend_gqa(q[at], *kept.layers[0], part, size**-0.5, window, sink), seen[at]
            )


LENGTHS, ENDS = (60, 57, 33), (60, 117, 150)
TOLERANCE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "rope"), [(64, 16), (40, 8), (512, 64)])
def test_latent_attention_is_that_over_the_widened_rows(
    rank: int, rope: int, compute: torch.dtype, kind: str, ops: Ops
) -> None:
    whole, exact, dtype = batch_of((60, 57, 33)), open_ops("cpu", 1, "torch"), KV_DTYPES[kind]
    latent, q = rows(150, rank + rope).to(compute), rows(150, 3, rank + rope, seed=1).to(compute)
    (kept,) = ops.open_cache([LayerShape(1, rank + rope)], 11, BLOCK, dtype).layers[0]
    (plain,) = exact.open_cache([LayerShape(1, rank + rope)], 11, BLOCK, dtype).layers[0]
    ops.write_latent(latent, kept, whole.kv_slot_T, rank)
    exact.write_latent(latent, plain, whole.kv_slot_T, rank)
    assert torch.equal(kept.view(torch.int8), plain.view(torch.int8))
    wide, scale = latents_at(plain, torch.arange(11), rank), (rank + rope) ** -0.5
    seen = ops.attend_mla(q, kept, rank, whole, scale)
    wanted = exact.attend_mla(q.float(), wide, rank, whole, scale)
    torch.testing.assert_close(seen.float(), wanted, **TOLERANCE[compute])
    for counts in CUTS if ops.backend_name == "native" else ():
        at = [i for s, n in enumerate(counts) for i in range(ENDS[s] - min(n, LENGTHS[s]), ENDS[s])]
        assert torch.equal(ops.attend_mla(q[at], kept, rank, batch_of(counts), scale), seen[at])


@pytest.mark.parametrize("rank", [0, 128])
def test_a_long_context_has_the_same_bits_however_it_is_asked(ops: Ops, kind: str, rank: int) -> None:
    """Over splits and whole windows of keys, or latents: the last two tokens of 1,100, alone, together and within a
    prompt."""
    context, count, size = 1100, 70, 64
    table = torch.randperm(69, generator=torch.Generator().manual_seed(2))[None].int()
    position = torch.arange(context)
    slot = table[0, position // BLOCK].long() * BLOCK + position % BLOCK
    shape = LayerShape(1, rank + size) if rank else LayerShape(2, size, size)
    cache = ops.open_cache([shape], 69, BLOCK, KV_DTYPES[kind]).layers[0]
    k, v, q = (rows(context, n, rank + size, seed=n).bfloat16() for n in (2, 3, 8))
    if rank:
        ops.write_latent(k[:, 0].contiguous(), cache[0], slot, rank)
    else:
        ops.write_kv(k, v[:, :2], *cache, slot)

    def attended(of: Ops, q: torch.Tensor, kept: Sequence[torch.Tensor], batch: PagedBatch) -> torch.Tensor:
        return of.attend_mla(q, kept[0], rank, batch, 0.07) if rank else of.attend_gqa(q, *kept, batch, 0.125)

    def last(tokens: int) -> torch.Tensor:
        batch = PagedBatch(
            position[-tokens:], slot[-tokens:], torch.tensor([0, tokens]).int(), torch.tensor([context]).int(),
            table, tokens, context,
        )  # fmt: skip
        return attended(ops, q[-tokens:], cache, batch)

    many = last(count)
    assert torch.equal(last(1), many[-1:]) and torch.equal(last(2), many[-2:])
    blocks = torch.arange(69)
    wide = [latents_at(cache[0], blocks, rank)] if rank else [x.contiguous() for x in pair_at(*cache, blocks)]
    batch = PagedBatch(
        position[-1:], slot[-1:], torch.tensor([0, 1]).int(), torch.tensor([context]).int(), table, 1, context
    )
    wanted = attended(open_ops("cpu", 1, "torch"), q[-1:].float(), wide, batch)
    torch.testing.assert_close(many[-1:].float(), wanted, atol=2e-2, rtol=2e-2)
