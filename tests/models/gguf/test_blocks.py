"""Blocks of every type against the reference of llama.cpp's own package."""

import numpy as np
import pytest
import torch

from afserve.gguf.kinds import KINDS, PACKED
from afserve.models.blocks import groups, unblocked

gguf = pytest.importorskip("gguf", reason="llama.cpp's package is the oracle")


def drawn(kind, rows, blocks):
    """Any bytes, but no scale that is infinite or not a number."""
    bytes_RB = np.random.default_rng(len(kind)).integers(0, 256, (rows, blocks * PACKED[kind].size), np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(bytes_RB, gguf.GGMLQuantizationType[kind])
    whole = np.isfinite(wanted.reshape(rows * blocks, -1)).all(1).reshape(rows, blocks).all(1)
    assert whole.any()
    return bytes_RB[whole], wanted[whole]


@pytest.mark.parametrize("kind", PACKED)
def test_every_number_is_the_reference_s(kind):
    bytes_RB, wanted = drawn(kind, 64, 3)
    assert np.array_equal(unblocked(torch.from_numpy(bytes_RB), kind).numpy(), wanted)


@pytest.mark.parametrize("kind", ["Q4_0", "MXFP4"])
def test_groups_have_the_same_numbers(kind):
    bytes_RB, wanted = drawn(kind, 16, 5)
    made = groups(torch.from_numpy(bytes_RB), kind)
    assert made.code_OI.dtype is torch.int8 and made.size == 32
    assert np.array_equal(made.dequantised().numpy(), wanted)


def test_sizes_are_those_of_ggml():
    for number, kind in KINDS.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[number] == (kind.numbers, kind.size)
