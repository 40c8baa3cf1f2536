"""FMAs in place of VDPBF16PS, where that is slow: not one bit of a product or of attention is different."""

import pytest
import torch
from torch import Tensor

from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from tests.kernels.conftest import native
from tests.kernels.test_native_attention import filled, in_tiles, paged

pytestmark = pytest.mark.by_day(2)

ROWS = (1, 2, 4, 5, 6, 7, 12, 25, 33, 64, 130)


def both() -> tuple[Ops, Ops]:
    return native("avx512bf16", 2), native("avx512bf16fma", 2)


def drawn(shape: tuple[int, ...], seed: int, powers: int) -> Tensor:
    """With up to so many powers of two more or less; many products of the far ones are no normal floats."""
    g = torch.Generator().manual_seed(seed)
    power = torch.randint(-powers, powers + 1, shape, generator=g).float()
    return (torch.randn(shape, generator=g) * torch.exp2(power)).bfloat16()


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = torch.int32 if a.dtype is torch.float32 else torch.int16
    return torch.equal(a.view(whole), b.view(whole))


@pytest.mark.parametrize("powers", [0, 70])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (70, 100), (130, 544), (1, 1)])
def test_products_have_the_bits_of_dot_products(outputs: int, inputs: int, powers: int) -> None:
    dots, fmas = both()
    weight = drawn((outputs, inputs), 1, powers)
    for rows in ROWS:
        x = drawn((rows, inputs), rows, powers)
        made = [ops.logits(x, ops.pack_linear(weight, None)) for ops in (dots, fmas)]
        assert same_bits(*made), rows


@pytest.mark.parametrize("loud", [1, 40])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "size"), [(8, 64), (2, 128), (16, 64), (6, 80), (12, 16), (32, 48)])
def test_attention_has_the_bits_of_dot_products(heads: int, size: int, window: int | None, loud: int) -> None:
    """Heads of 80 have words that no sixteen pairs hold; sixteen heads a group make windows of eight tiles."""
    batch, blocks = paged([(100, 700), (1, 300), (3, 40), (37, 37)], 16)
    k = filled((blocks, 2, 16, size), torch.bfloat16, 1, batch.block_table_SB)
    v = filled((blocks, 2, 16, size), torch.bfloat16, 2, batch.block_table_SB)
    q = loud * torch.randn(batch.tokens, heads, size, generator=torch.Generator().manual_seed(3))
    made = [ops.attend_gqa(q.bfloat16(), *in_tiles(k, v), batch, size**-0.5, window) for ops in both()]
    assert made[0].isfinite().all()
    assert same_bits(*made)


def test_a_value_that_is_not_finite_stays_in_its_sequence() -> None:
    """Rows past a context and blocks of others are widened with the rest, and must not be multiplied."""
    batch, blocks = paged([(40, 70), (40, 75)], 16)
    k = filled((blocks, 2, 16, 64), torch.bfloat16, 1, batch.block_table_SB)
    v = filled((blocks, 2, 16, 64), torch.bfloat16, 2, batch.block_table_SB)
    last = last_block(batch, 0)
    v[last, :, 70 % 16 :] = float("nan")  # no token of the sequence sees these
    k[last, :, 70 % 16 :] = float("nan")
    q = torch.randn(batch.tokens, 8, 64).bfloat16()
    out = both()[1].attend_gqa(q, *in_tiles(k, v), batch, 0.125)
    assert out.isfinite().all()
    v[batch.block_table_SB[0, 0].long()] = float("inf")
    out = both()[1].attend_gqa(q, *in_tiles(k, v), batch, 0.125)
    assert not out[:40].isfinite().any()
    assert out[40:].isfinite().all()


def last_block(batch: PagedBatch, sequence: int) -> int:
    return int(batch.block_table_SB[sequence, (int(batch.context_S[sequence]) - 1) // 16])
