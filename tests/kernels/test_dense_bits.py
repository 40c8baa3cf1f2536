"""Linear maps and maps by head in few bits: against float64 with the values that are kept; bits in any batch."""

import pytest
import torch
from torch import Tensor

from afserve.kernels.grouped import Groups, int4_rounded, int8_rounded
from afserve.kernels.ops import Ops
from tests.kernels.packing import rows_of_codes
from tests.kernels.test_native_experts import tolerance

pytestmark = pytest.mark.by_day(2)

DTYPES = [torch.float32, torch.bfloat16]
KEPT = [
    (True, None),
    (False, Groups(32)),
    (False, Groups(96)),
    (False, Groups(1024)),
]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(weight_OI: Tensor, int8: bool, int4: Groups | None) -> Tensor:
    if int4 is not None:
        return int4_rounded(weight_OI, int4.size)
    return int8_rounded(weight_OI) if int8 else weight_OI


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (100, 33), (7, 128), (130, 1000)])
@pytest.mark.parametrize("int4", [Groups(32), Groups(96), Groups(1024)])
def test_int4_maps_compute_with_the_rounded_weights(
    ops: Ops, shape: tuple[int, int], dtype: torch.dtype, int4: Groups
) -> None:
    weight, bias = (drawn(3, *shape) / shape[1] ** 0.5).to(dtype), drawn(4, shape[0]).to(dtype)
    packed = ops.pack_linear(weight, bias, int4=int4)
    used = int4_rounded(weight, int4.size)
    for rows in (0, 1, 2, 6, 40, 129):
        x = drawn(rows, rows, shape[1]).to(dtype)
        wanted = rows_of_codes(ops, dtype)(x) @ used.double().t() + bias.double()
        torch.testing.assert_close(ops.linear(x, packed).double(), wanted, atol=tolerance(dtype), rtol=1e-2)
        torch.testing.assert_close(
            ops.logits(x, packed).double(), wanted, atol=2e-5 if dtype == torch.float32 else 1e-3, rtol=1e-3
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 40, 64), (2, 130, 33)])
@pytest.mark.parametrize(("int8", "int4"), [(False, None), *KEPT])
def test_maps_by_head_compute_with_the_rounded_weights(
    ops: Ops, shape: tuple[int, int, int], dtype: torch.dtype, int8: bool, int4: Groups | None
) -> None:
    heads, _, inputs = shape
    weight = (drawn(5, *shape) / inputs**0.5).to(dtype)
    packed = ops.pack_heads(weight, int8, int4)
    used = torch.stack([rounded(weight[head], int8, int4) for head in range(heads)]).double()
    for rows in (1, 5, 33, 130):
        x = drawn(rows, rows, heads, inputs).to(dtype)
        of_rows = rows_of_codes(ops, dtype, int8) if int8 or int4 else Tensor.double
        wanted = torch.einsum("tai,aoi->tao", of_rows(x), used)
        torch.testing.assert_close(
            ops.linear_heads(x, packed).double(), wanted, atol=tolerance(dtype), rtol=1e-2
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("int8", "int4"), KEPT)
def test_a_row_does_not_depend_on_the_others_or_on_threads(
    pair: tuple[Ops, Ops], dtype: torch.dtype, int8: bool, int4: Groups | None
) -> None:
    weight, x = drawn(6, 150, 200).to(dtype), drawn(7, 70, 200).to(dtype)
    heads, by_head = drawn(8, 3, 50, 64).to(dtype), drawn(9, 70, 3, 64).to(dtype)
    one, three = pair
    whole = three.linear(x, three.pack_linear(weight, None, int8, int4))
    whole_heads = three.linear_heads(by_head, three.pack_heads(heads, int8, int4))
    packed, packed_heads = one.pack_linear(weight, None, int8, int4), one.pack_heads(heads, int8, int4)
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 16, 41):
        assert torch.equal(one.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(one.linear_heads(by_head[:rows], packed_heads), whole_heads[:rows])


@pytest.mark.parametrize("int4", [Groups(32), Groups(512)])
def test_rows_times_int4_weights_lose_less_than_bfloat16_would(ops: Ops, int4: Groups) -> None:
    """As for int8 weights: a large number beside small ones, tiny rows, zeros, and every other number a zero. With AVX2
    that is beside what 8 bits for every 32 numbers lose."""
    weight = drawn(6, 64, 512).bfloat16()
    x = drawn(7, 6, 512)
    x[1, 7], x[2], x[3], x[4] = 3000.0, x[2] * 1e-20, 0.0, x[4] * 1e-37
    x[5, ::2] = 0.0
    x = x.bfloat16()
    made = ops.logits(x, ops.pack_linear(weight, None, int4=int4)).double()
    wanted = rows_of_codes(ops, x.dtype)(x) @ int4_rounded(weight, int4.size).double().t()
    size = wanted.square().mean(1).sqrt()
    assert ((made - wanted).abs().amax(1) <= size * 2.0**-9 + 1e-30).all()
    assert torch.equal(made[3], torch.zeros(64, dtype=torch.float64))


@pytest.mark.parametrize(("int8", "int4"), KEPT)
def test_extremes_do_not_overflow(ops: Ops, int8: bool, int4: Groups | None) -> None:
    """Rows and weights at the ends of their ranges, all of one sign: no sum of whole numbers may wrap around."""
    inputs = 4096
    weight, x = torch.full((64, inputs), -1.0).bfloat16(), torch.full((3, inputs), 1.0).bfloat16()
    made = ops.logits(x, ops.pack_linear(weight, None, int8, int4))
    torch.testing.assert_close(made, torch.full((3, 64), -float(inputs)), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(("int8", "int4"), KEPT)
def test_what_is_not_finite_spoils_its_row_or_its_output_only(
    ops: Ops, int8: bool, int4: Groups | None
) -> None:
    weight, x = drawn(1, 40, 64).bfloat16(), drawn(2, 5, 64).bfloat16()
    x[1, 3], x[4, 63] = torch.nan, -torch.inf
    made = ops.logits(x, ops.pack_linear(weight, None, int8, int4))
    assert made.isfinite().all(1).tolist() == [True, False, True, True, False]
    weight[7, 9] = torch.inf
    made = ops.logits(x[2:3], ops.pack_linear(weight, None, int8, int4))[0]
    assert [i for i in range(40) if not made[i].isfinite()] == [7]


def test_two_ways_at_once_and_wrong_groups_are_named(ops: Ops) -> None:
    with pytest.raises(ValueError, match="int8, fp8, int4: weights are kept as one of them"):
        ops.pack_linear(torch.zeros(4, 4), None, True, Groups())
    with pytest.raises(ValueError, match="int4: groups of 48 inputs, expected a multiple of 32"):
        ops.pack_heads(torch.zeros(2, 4, 4), int4=Groups(48))
