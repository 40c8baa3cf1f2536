"""Linear maps in e4m3 blocks beside the reference over weights and rows that are rounded alike."""

import pytest
import torch

from afserve.kernels.formats.scaled import BlockScaled, ScaledRows, joined_blocks, quantised_blocks
from afserve.kernels.ops import Ops
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.dense import tile_of_map
from afserve.kernels.triton.tiles import TileTable
from tests.kernels.reference_fp8 import BlockReference


@pytest.mark.usefixtures("fp8")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "bias", "dtype"),
    [
        (1, 200, 160, False, torch.bfloat16),  # neither side whole blocks
        (21, 128, 256, True, torch.float16),
        (70, 300, 128, True, torch.bfloat16),  # two tiles of rows
        (0, 128, 128, False, torch.bfloat16),
    ],
)
def test_rows_times_blocks(device, close, rows, outputs, inputs, bias, dtype):
    torch.manual_seed(rows)
    ops, oracle = Ops(TritonBackend(device, 4), device, 1), Ops(BlockReference(), torch.device("cpu"), 1)
    scales = 10 ** torch.rand(-(-outputs // 128), 1).repeat_interleave(128, 0)[:outputs]  # not all alike
    blocks = quantised_blocks(torch.randn(outputs, inputs) * scales / inputs**0.5)
    x_TI, bias_O = torch.randn(rows, inputs + 3).to(dtype)[:, 3:], torch.randn(outputs).to(dtype)
    given = bias_O if bias else None
    expected = oracle.linear(x_TI, oracle.pack_linear_fp8(blocks, given, dtype))
    there = BlockScaled(blocks.q_OI.to(device), blocks.scale.to(device))
    packed = ops.pack_linear_fp8(there, bias_O.to(device) if bias else None, dtype)
    got = ops.linear(x_TI.to(device), packed)
    assert packed.weight_OI is None and got.dtype is dtype
    close(got, expected)
    plain = ops.pack_linear_fp8(there, None, torch.float32)
    assert plain.handle is None and torch.equal(plain.weight_OI.cpu(), blocks.dequantised())


def test_columns_fill_the_chip():
    for rows, height, columns in (
        (1, 16, [128, 64, 32]),
        (17, 64, [128, 64, 32]),
        (129, 64, [128, 128, 128]),
    ):
        found = [tile_of_map(TileTable(), 132, rows, outputs) for outputs in (24576, 7168, 4096)]
        assert [tile.columns for tile in found] == columns and {tile.rows for tile in found} == {height}


def test_parts_of_a_map_are_blocks_where_they_fit():
    weight = torch.randn(384, 160) * torch.tensor([1.0, 2.0, 4.0]).repeat_interleave(128)[:, None]
    blocks = quantised_blocks(weight)
    rows = ScaledRows.of(blocks)
    turned = rows[torch.arange(384).view(-1, 2, 64).flip(1).flatten()]
    joined = joined_blocks((rows[:128], turned[128:256], rows[256:300]))
    assert joined is not None and torch.equal(joined.scale, blocks.scale)
    assert torch.equal(joined.dequantised()[:128], blocks.dequantised()[:128])
    assert joined_blocks((rows[:64], rows[128:])) is None, "128 outputs of two blocks"
    assert torch.equal(rows.dequantised(), blocks.dequantised())
    assert torch.equal(rows.columns(128, 160).dequantised(), blocks.dequantised()[:, 128:])
