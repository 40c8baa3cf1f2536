"""Values that are not finite, planted everywhere, on the Triton kernels."""

import pytest
import torch

from afserve.kernels.ops import Ops
from afserve.kernels.triton.backend import TritonBackend
from tests.kernels import nonfinite
from tests.kernels.conftest import on_their_own
from tests.kernels.packing import pack_experts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes NaNs with numpy
DTYPES = [torch.bfloat16, torch.float32]
with_values = pytest.mark.parametrize("value", nonfinite.VALUES)
LONG_VALUES = [pytest.param(value, marks=pytest.mark.long) for value in nonfinite.VALUES[1:]]
# Where the interpreter takes seconds: the others run with `make test-all`, and on the native kernels always.
with_a_value = pytest.mark.parametrize("value", [nonfinite.VALUES[0], *LONG_VALUES])
with_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def ops(device):
    made = Ops(TritonBackend(device, multiprocessors=2, parts=3), device, 1)
    with on_their_own(made):
        yield made


@with_values
@with_dtypes
def test_sums_mark_the_rows_that_are_lost(ops, dtype, value):
    nonfinite.check_add_sums(ops, dtype, value)


@with_dtypes
def test_sums_that_overflow_are_lost(ops, dtype):
    nonfinite.check_sums_that_overflow(ops, dtype)


@with_values
def test_argmax_of_a_lost_row_is_minus_one(ops, value):
    nonfinite.check_argmax(ops, value)


@pytest.mark.by_day(1)
@with_values
@pytest.mark.parametrize("rule", nonfinite.RULES)
def test_a_lost_row_has_experts_and_no_weights(ops, value, rule):
    nonfinite.check_route(ops, torch.bfloat16, value, rule)


@pytest.mark.parametrize("rule", nonfinite.RULES)
def test_a_bias_that_is_no_number_loses_every_row(ops, rule):
    nonfinite.check_bias(ops, torch.bfloat16, rule)


@with_values
def test_rows_are_lost_alone(ops, value):
    nonfinite.check_rows(ops, torch.bfloat16, value)


@pytest.mark.by_day(1)
@with_values
@pytest.mark.parametrize("int8", [False, True])
def test_an_expert_loses_its_rows_only(ops, value, int8):
    nonfinite.check_experts(ops, lambda up, down: pack_experts(ops, up, down, int8), torch.bfloat16, value)


@with_a_value
def test_an_expert_in_fp8_blocks_loses_its_rows_only(ops, fp8, value):
    nonfinite.check_experts(ops, lambda up, down: nonfinite.pack_fp8(ops, up, down), torch.bfloat16, value)


@pytest.mark.parametrize(
    ("value", "window"),
    [
        (torch.nan, None),
        (-torch.inf, 10),  # what masks a score, too
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((torch.inf, None), (-torch.inf, None))),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((torch.nan, 10), (torch.inf, 10))),
    ],
)
def test_attention_reads_what_a_token_sees_only(ops, value, window):
    nonfinite.check_gqa(ops, torch.bfloat16, value, window=window, lengths=nonfinite.SHORT)


@with_a_value
def test_latent_attention_reads_what_a_token_sees_only(ops, value):
    nonfinite.check_mla(ops, torch.bfloat16, value, nonfinite.SHORT)


@with_a_value
def test_the_half_loses_the_rows_that_meet_it(ops, value):
    nonfinite.check_half(ops, torch.bfloat16, value, nonfinite.SHORT)


@with_dtypes
def test_whole_blocks_are_cleared(ops, dtype):
    nonfinite.check_clear_blocks(ops, dtype)
