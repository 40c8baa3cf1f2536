"""Rows that a GPU fetches itself, in words and in bytes; the fence of the interpreter stands around both memories."""

import pytest
import torch

from afserve.kernels.devices.pages import lent_to
from afserve.kernels.triton.near import FetchedRows
from tests.kernels.test_near_rows import played


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 5), (torch.bfloat16, 5), (torch.bfloat16, 6)])
def test_rows_are_those_of_the_host(device, dtype, width):
    far = lent_to(device, (12, 5, width), dtype)
    far.copy_(torch.randn(12, 5, width))
    near = FetchedRows(far, 19, torch.zeros(4, dtype=torch.int64, device=device))
    played(near, far, width, device)
