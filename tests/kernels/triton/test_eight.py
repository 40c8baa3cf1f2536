"""A KV cache in 8 bits: the reference's bytes, and attention over them against float64 over their numbers."""

from dataclasses import replace

import pytest
import torch

from afserve.errors import ConfigError
from afserve.kernels.cache import LayerShape
from afserve.kernels.formats.eight_bits import KV_DTYPES, key_width, latents_at, pair_at
from afserve.kernels.ops import Ops
from afserve.kernels.reference import Reference
from afserve.kernels.triton import mla_prompts
from afserve.kernels.triton.attention import attend_gqa
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.eight import gather_latents
from afserve.kernels.triton.kv import keep_latents, rope_write_kv, write_kv, write_latent
from afserve.kernels.triton.mla import attend_mla
from tests.kernels.triton.test_attention import BLOCK, SHAPES, TILE, gqa_truth, paged
from tests.kernels.triton.test_kv import angles, batch_to, latent_layer
from tests.kernels.triton.test_latent_prompts import TABLE, layer_of, told, wide

pytestmark = [pytest.mark.by_day(2), pytest.mark.usefixtures("fp8")]
KINDS = [(each, dtype) for each in KV_DTYPES for dtype in (torch.bfloat16, torch.float16, torch.float32)]


@pytest.fixture(params=KINDS, ids=lambda pair: f"{pair[0]} of {pair[1]}".replace("torch.", ""))
def kinds(request):
    """What a cache keeps numbers in, and what they were."""
    return KV_DTYPES[request.param[0]], request.param[1]


def spoiled(*shape, dtype, device="cpu"):
    """A cache whose unused rows have NaN as scales."""
    return torch.full(shape, -1, dtype=torch.int8, device=device).view(dtype)


def strange(*shape, dtype, most=torch.inf):
    """Rows of usual numbers, and with nothing but noughts, small ones, no number, and a large one."""
    x = torch.randn(*shape)
    x[0], x[1, 0], x[2, :, 3], x[3, 0, 1], x[4, 0, 2] = 0.0, x[1, 0] * 1e-7, torch.nan, -most, 6e4
    return x.to(dtype)


def equal_bytes(found, wanted):
    return torch.equal(found.cpu().view(torch.int8), wanted.cpu().view(torch.int8))


@pytest.mark.parametrize("half", [0, 12, 8])
def test_keys_and_values_have_the_bytes_of_the_reference(device, kinds, half):
    """As they are, and turned and normed: as rows of a cache in their own dtype would be kept."""
    torch.manual_seed(0)
    kept, dtype = kinds
    k, v = (strange(6, 3, 24, dtype=dtype, most=9.0 if half else torch.inf).to(device) for _ in range(2))
    slot = torch.tensor([9, 0, 14, 7, 2, -1], device=device)
    found = [spoiled(4, 3, 4, width, dtype=kept, device=device) for width in (32, 24)]
    wanted = [cache.clone() for cache in found]
    if half:
        norm = torch.rand(24).to(device, dtype)
        cos, sin = (table.to(device) for table in angles(half))
        plain = [torch.zeros(4, 3, 4, 24, dtype=dtype, device=device) for _ in range(2)]
        more = k, k, v, cos, sin, torch.arange(6, device=device)
        turned = [rope_write_kv(*more, *cache, slot, False, norm, norm, 1e-6) for cache in (plain, found)]
        assert equal_bytes(*turned)
        k = plain[0].transpose(1, 2).flatten(0, 1)[slot[:5]]
    else:
        write_kv(k, v, *found, slot)
    Reference(device).write_kv(k[:5], v[:5], *wanted, slot[:5])
    assert equal_bytes(found[0], wanted[0]) and equal_bytes(found[1], wanted[1])


@pytest.mark.parametrize("rope", [None, 8, 0])
def test_latents_have_the_bytes_of_the_reference(device, kinds, rope):
    """A latent with what is behind it as it is, or both normed and turned; an index key has nothing behind it."""
    torch.manual_seed(1)
    kept, dtype = kinds
    slot = torch.tensor([9, 0, 4, 7, 2, -1], device=device)
    if rope is None:
        made = strange(6, 1, 28, dtype=dtype)[:, 0].to(device)
        for rank in (20, 28):
            found = [spoiled(3, 4, 36, dtype=kept, device=device) for _ in range(2)]
            write_latent(made, found[0], slot, rank)
            Reference(device).write_latent(made[:5], found[1], slot[:5], rank)
            assert equal_bytes(*found)
        return
    layer, batch = latent_layer(device, dtype, rope), batch_to(slot)
    made = strange(6, 1, 28 + 20 + rope, dtype=dtype, most=9.0)[:, 0].to(device)
    found = [spoiled(3, 4, key_width(20 + rope, kept), dtype=kept, device=device) for _ in range(2)]
    plain = torch.zeros(3, 4, 20 + rope, dtype=dtype, device=device)
    assert equal_bytes(*(keep_latents(made, layer, cache, batch) for cache in (plain, found[0])))
    rows = plain.flatten(0, 1)[slot[:5]]
    Reference(device).write_latent(rows, found[1], slot[:5], 20)
    assert equal_bytes(*found)


def filled(blocks, shape, write, size=BLOCK):
    """`write` of every place of a context, block after block."""
    for (_, context), ids in zip(shape, blocks, strict=True):
        at = torch.arange(context)
        write(context, ids[at // size] * size + at % size)


@pytest.mark.parametrize(
    ("name", "window", "sinks", "parts"),
    [("mixed", None, False, 3), ("decode", 11, True, 1), ("chunks", 11, True, 1)],
)
def test_heads_attend_what_codes_stand_for(device, close, kinds, name, window, sinks, parts):
    """Values a hundredth as large as keys: float16 would lose weights of theirs."""
    torch.manual_seed(2)
    (kept, dtype), shape = kinds, SHAPES[name]
    batch, blocks, count = paged(shape, device)
    cache = [spoiled(count, 2, BLOCK, width, dtype=kept) for width in (32, 24)]

    def write(rows, slot):
        k, v = torch.randn(rows, 2, 24), torch.randn(rows, 2, 24) / 100
        Reference().write_kv(k.to(dtype), v.to(dtype), *cache, slot)

    filled(blocks, shape, write)
    q, sink = torch.randn(batch.tokens, 6, 24).to(dtype), torch.randn(6) if sinks else None
    moved = None if sink is None else sink.to(device)
    k, v = (x.to(device) for x in cache)
    out = attend_gqa(q.to(device), k, v, batch, 0.3, window, moved, TILE, TILE, parts)
    numbers = pair_at(*cache, torch.arange(count))
    close(out * 100, gqa_truth(q, *numbers, shape, blocks, 0.3, window, sink) * 100)


@pytest.mark.parametrize(("name", "heads", "parts", "block"), [("mixed", 18, 3, BLOCK), ("decode", 3, 1, 32)])
def test_latents_attend_what_codes_stand_for(device, close, kinds, name, heads, parts, block):
    torch.manual_seed(3)
    (kept, dtype), shape = kinds, SHAPES[name]
    batch, blocks, count = paged(shape, device, block=block)
    cache = spoiled(count, block, 56, dtype=kept)

    def write(rows, slot):
        Reference().write_latent(torch.randn(rows, 48).to(dtype), cache, slot, 40)

    filled(blocks, shape, write, block)
    q = torch.randn(batch.tokens, heads, 48).to(dtype)
    out = attend_mla(*q.to(device).split((40, 8), 2), cache.to(device), batch, 0.2, TILE, parts)
    numbers = latents_at(cache, torch.arange(count), 40)[:, None]
    close(out, gqa_truth(q, numbers, numbers[..., :40], shape, blocks, 0.2))


def test_prompts_multiply_up_what_codes_stand_for(device, close, kinds, monkeypatch):
    torch.manual_seed(4)
    calls, attend = [], mla_prompts.attend_prompts
    monkeypatch.setattr(mla_prompts, "attend_prompts", lambda *a: calls.append(len(a[6])) or attend(*a))
    (kept, dtype), shape = kinds, [(1, 9), (32, 44)]
    ops = TritonBackend(device, 2, TABLE)
    layer = layer_of(ops, dtype)
    batch, blocks, count = told(shape, device)
    cache = spoiled(count, BLOCK, 56, dtype=kept)

    def write(rows, slot):
        Reference().write_latent(torch.randn(rows, 48).to(dtype), cache, slot, 32)

    filled(blocks, shape, write)
    numbers, rows = latents_at(cache, torch.arange(count), 32).to(dtype), blocks[1] * BLOCK + 3
    gathered = gather_latents(cache.to(device), rows.to(device), 32, dtype)
    assert torch.equal(gathered.cpu(), numbers.flatten(0, 1)[rows])
    q, turned = (torch.randn(33, layer.heads, d).to(dtype) for d in (layer.nope, layer.rope))
    out = ops.attend_latent(q.to(device), turned.to(device), layer, cache.to(device), batch)
    exact, (on_host, _, _) = Reference(), told(shape, "cpu")
    on_host = replace(on_host, block_table_SB=batch.block_table_SB.cpu())
    truth = exact.attend_latent(q.double(), turned.double(), wide(layer, exact), numbers.double(), on_host)
    close(out, truth, steps=8.0)
    assert calls == [2]


def test_what_is_not_read_is_refused(device):
    with pytest.raises(ConfigError, match=r"--kv-dtype: rows of 30 bytes .* Leave it out"):
        Ops(TritonBackend(device, 2), device, 1).open_cache([LayerShape(2, 22, 22)], 3, 8, torch.int8)
    with pytest.raises(ConfigError, match=r"--kv-dtype fp8: this GPU has no FP8 conversions .* use int8"):
        old = Ops(TritonBackend(device, 2, has_fp8=False), device, 1)
        old.open_cache([LayerShape(2, 24, 24)], 3, 8, torch.float8_e4m3fn)
