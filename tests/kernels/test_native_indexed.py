"""The fused half of a layer whose tokens attend chosen rows, against the single ops that it is made of."""

from dataclasses import replace

import pytest
import torch

from afserve.kernels.half_latent import latent_half_of_ops
from afserve.kernels.indexer import Indexer
from afserve.kernels.latent import BoundMla
from afserve.kernels.layer import Half
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from tests.kernels.test_indexer import batch_of
from tests.kernels.test_native_latent import HIDDEN, OWN, RANK, ROPE, layer

pytestmark = pytest.mark.by_day(2)

SIZE, HEADS, DIM, TOP = 8, 5, 24, 11
SEQUENCES, BLOCKS = [(7, 30), (1, 21), (3, 3)], [[4, 0, 7, 1], [2, 9, 5], [3]]


def bound(
    ops: Ops, dtype: torch.dtype, interleaved: bool, reuses: bool = False, int8: bool = False
) -> BoundMla:
    g = torch.Generator().manual_seed(8)

    def noise(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=g) / shape[-1] ** 0.5).to(dtype)

    sizes = (HEADS * DIM, OWN), (DIM, HIDDEN), (HEADS, HIDDEN)
    maps = [ops.pack_linear(noise(*size), None, int8) for size in sizes]
    indexer = Indexer(*maps, 1 + noise(DIM), noise(DIM), TOP, interleaved)
    plain = layer(ops, dtype, ranked=True, router=True).layer
    made = ops.prepare_mla(replace(plain, indexer=None if reuses else indexer, reuses=reuses))
    latent, index = (torch.randn(10, SIZE, n, generator=g).to(dtype) for n in (RANK + ROPE, DIM))
    return ops.bind_mla(made, latent) if reuses else ops.bind_mla(made, latent, index)


def run(ops: Ops, over: BoundMla, batch: PagedBatch, apart: bool = False) -> tuple[torch.Tensor, Half]:
    g = torch.Generator().manual_seed(9)
    x = torch.randn(batch.tokens, HIDDEN, generator=g).to(over.cache_NBC.dtype)
    half = latent_half_of_ops(ops._backend, x, over, batch) if apart else ops.mla_half(x, over, batch)
    return x, half


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_half_is_its_parts(pair: tuple[Ops, Ops], dtype: torch.dtype, interleaved: bool) -> None:
    results = []
    for ops, apart in ((pair[0], False), (pair[1], False), (pair[0], True)):
        over, batch = bound(ops, dtype, interleaved), batch_of(SEQUENCES, BLOCKS)
        assert over.handle is not None
        x, half = run(ops, over, batch, apart)
        assert batch.chosen.rows is not None and over.index_NBI is not None
        rows = batch.chosen.rows
        slots = [rows.block_table_SB[t, :count].tolist() for t, count in enumerate(rows.context_S.tolist())]
        results.append((x, *half, over.cache_NBC, over.index_NBI, slots))
    alone, threaded, parts = results
    assert alone[-1] == threaded[-1] == parts[-1]
    loose = {"atol": 1e-5, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.05, "rtol": 0.05}
    for mine, same, right in zip(alone[:-1], threaded[:-1], parts[:-1], strict=True):
        assert torch.equal(mine, same)
        torch.testing.assert_close(mine, right, **loose)


@pytest.mark.parametrize("top", [TOP, 64])
def test_a_layer_attends_what_an_earlier_one_chose(ops: Ops, top: int) -> None:
    """Whether the earlier one ran fused or as single ops; where all are chosen, all are attended."""
    found = []
    for first, second in ((False, False), (True, False), (False, True), (True, True)):
        chooses, batch = bound(ops, torch.float32, False), batch_of(SEQUENCES, BLOCKS)
        assert chooses.layer.indexer is not None
        if top != TOP:
            wider = replace(chooses.layer, indexer=replace(chooses.layer.indexer, top=top))
            chooses = ops.bind_mla(ops.prepare_mla(wider), chooses.cache_NBC, chooses.index_NBI)
        run(ops, chooses, batch, first)
        assert (batch.chosen.rows is None) == (top > 30)
        found.append(run(ops, bound(ops, torch.float32, False, reuses=True), batch, second))
    for x, half in found[1:]:
        assert torch.equal(x, found[0][0]) and torch.equal(half.normed_TH, found[0][1].normed_TH)
    plain = replace(bound(ops, torch.float32, False, reuses=True).layer, reuses=False)
    latent = bound(ops, torch.float32, False, reuses=True).cache_NBC
    everything = run(ops, ops.bind_mla(ops.prepare_mla(plain), latent), batch_of(SEQUENCES, BLOCKS))
    assert torch.equal(everything[0], found[0][0]) == (top > 30)


def test_a_token_has_the_bits_that_it_has_alone(ops: Ops) -> None:
    batch = batch_of(SEQUENCES, BLOCKS)
    over = bound(ops, torch.bfloat16, True)
    x, half = run(ops, over, batch)
    alone = bound(ops, torch.bfloat16, True)
    rows = torch.randn(batch.tokens, HIDDEN, generator=torch.Generator().manual_seed(9)).bfloat16()
    for at in range(7):
        one = rows[at : at + 1].clone()
        got = ops.mla_half(one, alone, batch_of([(1, 24 + at)], BLOCKS[:1]))
        assert torch.equal(one[0], x[at]) and torch.equal(got.normed_TH[0], half.normed_TH[at])


def test_weights_in_8_bits_are_taken_too(ops: Ops) -> None:
    over = bound(ops, torch.bfloat16, True, int8=True)
    assert over.handle is not None
    assert run(ops, over, batch_of(SEQUENCES, BLOCKS))[0].isfinite().all()
