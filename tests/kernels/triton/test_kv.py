"""Rotary embedding and cache writes against float64 rotation and plain indexing."""

import pytest
import torch

from afserve.kernels.half_latent import latents_kept
from afserve.kernels.latent import MlaLayer
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference
from afserve.kernels.triton.kv import keep_latents, rope, rope_write_kv, write_kv, write_latent

pytestmark = pytest.mark.by_day(2)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def angles(half, positions=50):
    angle = torch.arange(positions).float()[:, None] * 10000.0 ** -(torch.arange(half) / half)
    return angle.cos(), angle.sin()


def turned(x, cos, sin, position, interleaved):
    half = cos.shape[1]
    part = x[..., : 2 * half].double()
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    c, s = cos[position].double()[:, None], sin[position].double()[:, None]
    return torch.cat((first * c - second * s, second * c + first * s, x[..., 2 * half :].double()), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "half"), [(0, 2, 8, 4), (1, 1, 2, 1), (5, 3, 12, 6), (4, 2, 20, 4)]
)
def test_rope(device, close, dtype, interleaved, tokens, heads, size, half):
    torch.manual_seed(0)
    x = torch.randn(tokens, heads, size).to(dtype)
    cos, sin = angles(half)
    position = torch.randint(50, (tokens,))
    out = rope(x.to(device), cos.to(device), sin.to(device), position.to(device), interleaved)
    close(out, turned(x, cos, sin, position, interleaved))


def test_rope_of_a_view(device, close):
    wide = torch.randn(4, 3 * 8).bfloat16().to(device)
    view = wide[:, 8:].view(4, 2, 8)
    cos, sin = angles(4)
    position = torch.tensor([0, 9, 49, 3])
    out = rope(view, cos.to(device), sin.to(device), position.to(device), False)
    close(out, turned(view.cpu(), cos, sin, position, False))


def test_rope_with_angles_that_are_columns_of_a_wider_table(device, close):
    x = torch.randn(3, 2, 8)
    cos, sin = (table.to(device)[:, :4] for table in angles(6))
    position = torch.tensor([1, 7, 30])
    out = rope(x.to(device), cos, sin, position.to(device), False)
    close(out, turned(x, cos.cpu(), sin.cpu(), position, False))


def cache(*shape, dtype, device):
    return torch.full(shape, 7.0, dtype=dtype, device=device)


def at_slots(cache_NGBD, slots):
    size = cache_NGBD.shape[2]
    return cache_NGBD[slots // size, :, slots % size]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_write_kv(device, close, dtype, fused, tokens):
    torch.manual_seed(1)
    q, k, v = (torch.randn(tokens, n, d).to(dtype) for n, d in ((5, 12), (3, 12), (3, 10)))
    slots = torch.randperm(5 * 4)[:tokens]
    slots[2:3] = -1  # padding
    cos, sin = angles(6)
    position = torch.randint(50, (tokens,))
    k_cache, v_cache = (cache(5, 3, 4, d, dtype=dtype, device=device) for d in (12, 10))
    q, k, v, cos_d, sin_d, position_d, slots_d = (t.to(device) for t in (q, k, v, cos, sin, position, slots))
    if fused:
        out = rope_write_kv(q, k, v, cos_d, sin_d, position_d, k_cache, v_cache, slots_d, False)
        close(out, turned(q.cpu(), cos, sin, position, False))
    else:
        write_kv(k, v, k_cache, v_cache, slots_d)
    kept = slots >= 0
    keys = turned(k.cpu(), cos, sin, position, False) if fused else k.cpu().double()
    close(at_slots(k_cache.cpu(), slots[kept]), keys[kept])
    assert torch.equal(at_slots(v_cache.cpu(), slots[kept]), v.cpu()[kept])
    untouched = torch.ones(5 * 4, dtype=torch.bool)
    untouched[slots[kept]] = False
    free = torch.where(untouched)[0]
    assert bool((at_slots(k_cache.cpu(), free) == 7).all() and (at_slots(v_cache.cpu(), free) == 7).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [6, 4])
def test_norm_before_the_turn(device, close, dtype, half):
    torch.manual_seed(3)
    q, k, v = (torch.randn(3, n, 12).to(dtype) for n in (5, 3, 3))
    q_norm, k_norm = torch.rand(12).to(dtype), torch.rand(12).to(dtype)
    slots, position, (cos, sin) = torch.tensor([9, 0, 4]), torch.tensor([1, 20, 3]), angles(half)
    k_cache, v_cache = (cache(3, 3, 4, 12, dtype=dtype, device=device) for _ in range(2))
    moved = [t.to(device) for t in (q, k, v, cos, sin, position)]
    norms = q_norm.to(device), k_norm.to(device)
    out = rope_write_kv(*moved, k_cache, v_cache, slots.to(device), False, *norms, 1e-6)

    def truth(x, weight):
        normed = weight.double() * x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return turned(normed, cos, sin, position, False)

    close(out, truth(q, q_norm))
    close(at_slots(k_cache.cpu(), slots), truth(k, k_norm))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_write_latent(device, dtype, tokens):
    torch.manual_seed(2)
    rows, slots = torch.randn(tokens, 16).to(dtype), torch.randperm(12)[:tokens]
    slots[1:2] = -1
    store = cache(3, 4, 16, dtype=dtype, device=device)
    write_latent(rows.to(device), store, slots.to(device), 12)
    kept = slots >= 0
    assert torch.equal(store.flatten(0, 1).cpu()[slots[kept]], rows[kept])
    assert (store == 7).all(-1).sum() == 12 - kept.sum()


def latent_layer(device, dtype, rope, ranked=True, interleaved=True):
    """Latents of 20 numbers, queries of 28."""
    ops = Reference(torch.device(device))
    norms = [torch.rand(n).to(device, dtype) for n in (28, 20)]
    cos, sin = (t.to(device) for t in angles(4))
    down, none = ops.pack_linear(torch.zeros(28 + 20 + rope, 4), None), torch.zeros(1)
    return MlaLayer(
        none, down, norms[0] if ranked else None, down if ranked else None, norms[1],
        ops.pack_heads(torch.zeros(2, 20, 4)), ops.pack_heads(torch.zeros(2, 4, 20)), cos, sin, interleaved, down,
        none, None, None, None, None, 2, 4, rope, 1e-6, 1e-6, 0.2,
    )  # fmt: skip


def batch_to(slot_T):
    """Tokens at mixed positions that go to these slots."""
    position_T = torch.tensor([0, 7, 3, 49, 20, 11], device=slot_T.device)[: len(slot_T)]
    starts = torch.zeros(2, dtype=torch.int32, device=slot_T.device)
    return PagedBatch(position_T, slot_T, starts, starts[:1], starts[None], len(slot_T), 50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ranked", "rope", "interleaved"), [(True, 8, True), (False, 8, False), (True, 0, False)]
)
def test_latents_are_kept_as_by_single_ops(device, dtype, ranked, rope, interleaved):
    torch.manual_seed(3)
    layer = latent_layer(device, dtype, rope, ranked, interleaved)
    made, slot = torch.randn(5, 48 + rope).to(device, dtype), torch.randperm(12)[:5].to(device)
    found = [cache(3, 4, 20 + rope, dtype=dtype, device=device) for _ in range(2)]
    query = keep_latents(made, layer, found[0], batch_to(slot))
    wanted = latents_kept(Reference(torch.device(device)), made, layer, found[1], batch_to(slot))
    limits = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(query, wanted, **limits)
    torch.testing.assert_close(*found, **limits)
    before = cache(3, 4, 20 + rope, dtype=dtype, device=device)
    keep_latents(made, layer, before, batch_to(torch.full_like(slot, -1)))
    assert (before == 7).all()
