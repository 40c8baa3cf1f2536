"""Functions of single numbers: torch's values, and bits that do not depend on what stands beside a number."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from afserve.kernels.packed import Gating
from afserve.kernels.pointwise import capped, gelu_tanh, sigmoid, silu, softplus

BOTH = {
    "sigmoid": (sigmoid, torch.sigmoid),
    "silu": (silu, F.silu),
    "softplus": (softplus, F.softplus),
    "gelu": (gelu_tanh, partial(F.gelu, approximate="tanh")),
}


@pytest.mark.parametrize("name", BOTH)
@given(
    tokens=st.integers(1, 70),
    width=st.integers(1, 40),
    kept=st.integers(0, 9),
    at=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_a_row_has_the_same_bits_in_any_cutting(name, tokens, width, kept, at, seed):
    """`kept` columns of a wider tensor are passed over, as where one product makes several things at once."""
    ours, _ = BOTH[name]
    drawn = torch.randn(tokens, width + kept, generator=torch.Generator().manual_seed(seed)).bfloat16()
    x_TW = drawn[:, :width] * 8
    cut = torch.cat([ours(rows) for rows in x_TW.split(at)])
    assert torch.equal(cut, ours(x_TW))


@pytest.mark.parametrize(
    "gating", [Gating(), Gating(gelu=True), Gating(1.0, 1.7), Gating(0.5, bounded=True), Gating(squared=True)]
)
@given(tokens=st.integers(1, 70), inner=st.integers(1, 40), at=st.integers(1, 70), seed=st.integers(0, 99))
def test_rows_are_joined_to_the_same_bits_in_any_cutting(gating, tokens, inner, at, seed):
    drawn = torch.randn(tokens, gating.projections * inner, generator=torch.Generator().manual_seed(seed))
    cut = torch.cat([gating.join(rows) for rows in drawn.split(at)])
    assert torch.equal(cut, gating.join(drawn))


@pytest.mark.parametrize("name", BOTH)
def test_values_are_those_of_torch(name):
    ours, theirs = BOTH[name]
    x = torch.cat([torch.linspace(-120, 120, 4801), torch.tensor([torch.inf, torch.nan])])
    least = 1e-9 if name == "gelu" else 1e-30  # torch's takes what is left of 1 - tanh
    torch.testing.assert_close(ours(x), theirs(x.double()).float(), rtol=1e-6, atol=least, equal_nan=True)


def test_a_cap_bounds_on_both_sides():
    x = torch.linspace(-400, 400, 1601)
    torch.testing.assert_close(
        capped(x, 30.0), 30 * torch.tanh(x.double() / 30).float(), rtol=1e-5, atol=1e-5
    )
