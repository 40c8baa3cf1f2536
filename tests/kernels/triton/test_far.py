"""Caches and weights of more than 2^31 elements: a block or a slot that lies past that is found where it is.

The memory is asked for and not touched, but for the few rows that a test writes and the kernel reads.
"""

import numpy as np
import pytest
import torch

from afserve.kernels.paged import PagedBatch
from afserve.kernels.triton.attention import attend_gqa
from afserve.kernels.triton.config import AttentionTile, Tile
from afserve.kernels.triton.experts import ExpertWeights, grouped_down, grouped_gate_up
from afserve.kernels.triton.kv import rope_write_kv, write_kv, write_latent
from afserve.kernels.triton.mla import attend_mla
from afserve.kernels.triton.permute import RowPlan

FAR = 1 << 30  # elements from one block to the next: the third lies past 2^31
TILE = AttentionTile(16, 16, 16, 4, 1)


def untouched(elements, device):
    """Zeros that occupy nothing until they are written."""
    try:
        if device.type == "cpu":
            return torch.from_numpy(np.zeros(2 * elements, dtype=np.uint8)).view(torch.bfloat16)
        return torch.zeros(elements, dtype=torch.bfloat16, device=device)
    except (MemoryError, torch.OutOfMemoryError):
        return pytest.skip("not enough memory")


def far_cache(device, groups, block, size):
    """Three blocks, each FAR after the one before."""
    shape, strides = (3, groups, block, size), (FAR, block * size, size, 1)
    return untouched(2 * FAR + groups * block * size, device).as_strided(shape, strides)


def batch_of(device, queries, context, block_of_each):
    def tensor(values, dtype):
        return torch.tensor(values, dtype=dtype, device=device)

    at = torch.arange(context - queries, context, device=device)
    slots = tensor(block_of_each, torch.int64)[at // 8] * 8 + at % 8
    table = tensor([block_of_each], torch.int32)
    return PagedBatch(
        at, slots, tensor([0, queries], torch.int32), tensor([context], torch.int32), table, queries, context
    )


@pytest.mark.parametrize("queries", [1, 3])
def test_gqa_finds_a_far_block(device, close, queries):
    torch.manual_seed(0)
    k, v = (far_cache(device, 1, 8, 16) for _ in "kv")
    for cache in (k, v):
        cache[2] = torch.randn(1, 8, 16).bfloat16().to(device)
    near = [torch.cat((c[:1], c[2:])) for c in (k, v)]
    q = torch.randn(queries, 2, 16).bfloat16().to(device)
    outs = [
        attend_gqa(q, *caches, batch_of(device, queries, 7, [block]), 0.25, None, None, TILE, TILE, 1)
        for caches, block in (((k, v), 2), (near, 1))
    ]
    assert outs[0].abs().max() > 0 and torch.equal(*outs)


def test_mla_finds_a_far_block(device):
    torch.manual_seed(1)
    cache = far_cache(device, 1, 8, 24)[:, 0]
    cache[2] = torch.randn(8, 24).bfloat16().to(device)
    q = torch.randn(1, 2, 24).bfloat16().to(device)
    near = torch.cat((cache[:1], cache[2:]))
    outs = [
        attend_mla(q[..., :16], q[..., 16:], held, batch_of(device, 1, 7, [block]), 0.2, TILE, 1)
        for held, block in ((cache, 2), (near, 1))
    ]
    assert outs[0].abs().max() > 0 and torch.equal(*outs)


@pytest.mark.parametrize("fused", [False, True])
def test_a_far_slot_is_written(device, fused):
    torch.manual_seed(2)
    k_cache, v_cache = (far_cache(device, 1, 8, 16) for _ in "kv")
    kv, slot = torch.randn(1, 1, 16).bfloat16().to(device), torch.tensor([2 * 8 + 3], device=device)
    if fused:
        angle, at = torch.zeros(4, 8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        rope_write_kv(kv, kv, kv, angle + 1, angle, at, k_cache, v_cache, slot, False)
    else:
        write_kv(kv, kv, k_cache, v_cache, slot)
    for cache in (k_cache, v_cache):
        assert torch.equal(cache[2, 0, 3], kv[0, 0])
        assert not cache[0].any() and not cache[1].any() and cache[2].count_nonzero() == kv.count_nonzero()


def test_a_far_latent_is_written(device):
    torch.manual_seed(3)
    cache = far_cache(device, 1, 8, 24)[:, 0]
    row, slot = torch.randn(1, 24).bfloat16().to(device), torch.tensor([2 * 8 + 5], device=device)
    write_latent(row, cache, slot, 24)
    assert torch.equal(cache[2, 5], row[0]) and not cache[:2].any()


def test_a_far_slot_of_weights_is_multiplied(device, close):
    torch.manual_seed(4)
    hidden, inner, far = 32, 16, (1 << 21) + 3
    gate_up = untouched((far + 1) * 2 * inner * hidden, device).view(far + 1, 2 * inner, hidden)
    down = untouched((2 * far + 1) * inner * hidden, device).view(2 * far + 1, hidden, inner)
    gate_up[far] = (torch.randn(2 * inner, hidden) / 6).bfloat16().to(device)
    down[2 * far] = (torch.randn(hidden, inner) / 4).bfloat16().to(device)
    weights = ExpertWeights(gate_up, down)
    x = torch.randn(1, hidden).bfloat16().to(device)
    pair = torch.full((16,), -1, dtype=torch.int32, device=device)
    pair[0] = 0
    place = torch.zeros(1, 1, dtype=torch.int32, device=device)
    plans = [
        RowPlan(pair, torch.tensor([slot], dtype=torch.int32, device=device), place, 16)
        for slot in (far, 2 * far)
    ]
    h, _ = grouped_gate_up(x, None, weights, plans[0], 1, Tile(16, 16, 16, 4, 1))
    left, right = (x.double() @ gate_up[far].double().t()).chunk(2, -1)
    close(h[:1], left * left.sigmoid() * right)
    one = torch.ones(1, 1, device=device)
    y = grouped_down(h, None, weights, plans[1], one, Tile(16, 16, 16, 4, 1), torch.bfloat16)
    close(y[:1], h[:1].double() @ down[2 * far].double().t())
