"""Kernels that are wrong on purpose: the fence names what touches memory that was not given, and lets the others be."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.triton.checked_memory import extent
from tests.kernels.triton.conftest import CUDA

pytestmark = pytest.mark.skipif(CUDA, reason="a GPU has compute-sanitizer")


@triton.jit
def copy(x_ptr, y_ptr, count, shift, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at + shift, mask=at < count, other=0.0), mask=at < count)


@triton.jit
def add_one(word_ptr, shift):
    tl.atomic_add(word_ptr + shift, 1)


def test_what_is_inside_passes():
    x = torch.arange(12.0)
    y = torch.full((5,), -1.0)
    copy[(1,)](x[2:9], y, 5, 2, SIZE=8)
    assert y.tolist() == [4.0, 5.0, 6.0, 7.0, 8.0]


def test_a_read_behind_a_view_is_found_although_the_allocation_goes_on():
    x, y = torch.arange(12.0), torch.zeros(5)
    with pytest.raises(Exception, match="copy reads 4 bytes outside of all that it was given, 0 bytes"):
        copy[(1,)](x[2:6], y, 5, 0, SIZE=8)


def test_a_read_before_a_tensor_is_found():
    with pytest.raises(Exception, match="copy reads 4 bytes outside"):
        copy[(1,)](torch.arange(64.0)[32:40], torch.zeros(5), 5, -3, SIZE=8)


def test_a_write_and_an_atomic_beyond_are_found():
    with pytest.raises(Exception, match="copy writes 4 bytes outside"):
        copy[(1,)](torch.arange(8.0), torch.zeros(8)[:4], 5, 0, SIZE=8)
    with pytest.raises(Exception, match="add_one changes 4 bytes outside"):
        add_one[(1,)](torch.zeros(4, dtype=torch.int32)[:2], 2)


@triton.jit
def copy_rows(x_ptr, y_ptr, stride, ROWS: tl.constexpr, SAID: tl.constexpr):
    row = tl.multiple_of(tl.arange(0, ROWS) * stride, [SAID])
    tl.store(y_ptr + tl.arange(0, ROWS), tl.load(x_ptr + row))


def test_addresses_that_are_no_such_multiples_are_found():
    x, y = torch.arange(64.0), torch.zeros(4)
    copy_rows[(1,)](x, y, 8, ROWS=4, SAID=8)
    assert y.tolist() == [0.0, 8.0, 16.0, 24.0]
    with pytest.raises(Exception, match="copy_rows says that 12 is a multiple of 8"):
        copy_rows[(1,)](x, y, 12, ROWS=4, SAID=8)


def test_an_extent_is_that_of_a_view():
    assert extent(torch.zeros(4, 8)[1:3, 2:4]) == (8 + 2) * 4
    assert extent(torch.zeros(3, dtype=torch.bfloat16)) == 6


def test_memory_that_nobody_wrote_is_no_number():
    assert torch.empty(64).isnan().all()
    assert torch.empty(64, dtype=torch.bfloat16).isnan().all()
