"""Values that are not finite, planted everywhere: every instruction set of the native library, and the reference."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.kernels.cache import LayerShape
from afserve.kernels.ops import Ops, open_ops
from afserve.kernels.routing import RouterRule
from tests.kernels import nonfinite
from tests.kernels.conftest import SETS, native, on_their_own
from tests.kernels.packing import pack_experts
from tests.kernels.reference_fp8 import BlockReference

pytestmark = pytest.mark.by_day(2)

DTYPES = [torch.float32, torch.bfloat16]
with_values = pytest.mark.parametrize("value", nonfinite.VALUES)
with_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(params=[*SETS, "torch"], scope="module")
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    made = open_ops("cpu", 1, "torch") if request.param == "torch" else native(request.param, 2)
    with on_their_own(made):
        yield made


@with_values
@with_dtypes
def test_sums_mark_the_rows_that_are_lost(ops: Ops, dtype: torch.dtype, value: float) -> None:
    nonfinite.check_add_sums(ops, dtype, value)


@with_dtypes
def test_sums_that_overflow_are_lost(ops: Ops, dtype: torch.dtype) -> None:
    nonfinite.check_sums_that_overflow(ops, dtype)


@with_values
def test_argmax_of_a_lost_row_is_minus_one(ops: Ops, value: float) -> None:
    nonfinite.check_argmax(ops, value)


@with_values
@with_dtypes
@pytest.mark.parametrize("rule", nonfinite.RULES)
def test_a_lost_row_has_experts_and_no_weights(
    ops: Ops, dtype: torch.dtype, value: float, rule: RouterRule
) -> None:
    nonfinite.check_route(ops, dtype, value, rule)


@with_dtypes
@pytest.mark.parametrize("rule", nonfinite.RULES)
def test_a_bias_that_is_no_number_loses_every_row(ops: Ops, dtype: torch.dtype, rule: RouterRule) -> None:
    nonfinite.check_bias(ops, dtype, rule)


@with_values
@with_dtypes
def test_rows_are_lost_alone(ops: Ops, dtype: torch.dtype, value: float) -> None:
    nonfinite.check_rows(ops, dtype, value)


@with_values
@with_dtypes
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rows", [37, 150])
def test_an_expert_loses_its_rows_only(
    ops: Ops, dtype: torch.dtype, value: float, int8: bool, rows: int
) -> None:
    """Up to 24 rows of an expert are multiplied while its weights are widened, more of them another way."""
    nonfinite.check_experts(ops, lambda up, down: pack_experts(ops, up, down, int8), dtype, value, rows)


@pytest.mark.slow
@with_values
def test_an_expert_in_fp8_blocks_loses_its_rows_only(value: float) -> None:
    ops = Ops(BlockReference(), torch.device("cpu"), 1)
    nonfinite.check_experts(ops, lambda up, down: nonfinite.pack_fp8(ops, up, down), torch.bfloat16, value)


@with_values
@with_dtypes
@pytest.mark.parametrize(
    ("heads", "size", "window"), [(4, 48, None), (16, 64, None), (4, 64, 40), (2, 40, None), (2, 40, 21)]
)
def test_attention_reads_what_a_token_sees_only(
    ops: Ops, dtype: torch.dtype, value: float, heads: int, size: int, window: int | None
) -> None:
    """Heads of 40 elements are kept in rows, the others in tiles."""
    nonfinite.check_gqa(ops, dtype, value, heads=heads, size=size, window=window)


@with_values
@with_dtypes
def test_latent_attention_reads_what_a_token_sees_only(ops: Ops, dtype: torch.dtype, value: float) -> None:
    nonfinite.check_mla(ops, dtype, value)


@with_values
@with_dtypes
def test_the_fused_half_loses_the_rows_that_meet_it(ops: Ops, dtype: torch.dtype, value: float) -> None:
    nonfinite.check_half(ops, dtype, value)


@with_dtypes
def test_whole_blocks_are_cleared(ops: Ops, dtype: torch.dtype) -> None:
    nonfinite.check_clear_blocks(ops, dtype)


def test_bad_arguments_are_named(ops: Ops) -> None:
    x = torch.zeros(3, 8)
    for bad in (torch.zeros(3), torch.zeros(2).int(), torch.zeros(3, 2).int()[:, 0]):
        with pytest.raises(ValueError, match=r"bad_T: shape .* expected \(3,\) of torch.int32"):
            ops.add_sums(x, x, bad)
    with pytest.raises(ValueError, match="blocks: 4, the cache has 4"):
        ops.open_cache([LayerShape(1, 8)], 4, 8, torch.float32).clear_blocks(0, [1, 4])


BITS = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from(
        [0, 1, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF]
    ),
)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(1, 70))
def test_any_bits_are_judged_as_the_reference_does(ops: Ops, data: st.DataObject, size: int) -> None:
    """Sums, their marks and argmax of whatever 32 bits may be."""
    truth = open_ops("cpu", 1, "torch")
    drawn = data.draw(st.lists(BITS, min_size=4 * size, max_size=4 * size))
    rows = torch.tensor(drawn, dtype=torch.int64).to(torch.int32).view(torch.float32).view(4, size)
    assert ops.argmax(rows).tolist() == truth.argmax(rows).tolist()
    for dtype in DTYPES:
        results = []
        for backend in (ops, truth):
            x, bad = rows[:2].clone().to(dtype), torch.full((2,), -1, dtype=torch.int32)
            backend.add_sums(x, rows[2:], bad, 3)
            results.append((x, bad))
        (x, bad), (wanted_x, wanted_bad) = results
        assert bad.tolist() == wanted_bad.tolist()
        tiny = torch.finfo(torch.float32).tiny  # processors' bf16 conversions make zeros of less
        torch.testing.assert_close(x, wanted_x, atol=tiny, rtol=0, equal_nan=True)
