"""Experts in FP8 blocks in the native library: codes are exact, only rows and activations are rounded, as bf16 is."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.kernels.formats.scaled import FP8, BlockScaled, blocks_of, quantised_blocks
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedExperts

SHAPES = [(256, 128), (160, 136), (33, 17), (512, 72)]
BF16 = torch.bfloat16
Blocks = tuple[BlockScaled, BlockScaled, BlockScaled]


def drawn(rows: int, columns: int, codes: Tensor, seed: int) -> BlockScaled:
    """Any of these codes anywhere, and scales that differ by a factor of ten."""
    g = torch.Generator().manual_seed(seed)
    q_OI = codes[torch.randint(len(codes), (rows, columns), generator=g)].view(FP8)
    return BlockScaled(q_OI, (0.1 + torch.rand(blocks_of(rows, columns), generator=g)) / codes_size(codes))


def codes_size(codes: Tensor) -> float:
    return float(codes.view(FP8).float().square().mean().sqrt()) * 8


def codes_below(most: int) -> Tensor:
    magnitudes = torch.arange(most, dtype=torch.uint8)
    return torch.cat((magnitudes, magnitudes + 128))


CODES = {"all": codes_below(127), "small": codes_below(24)}
"""Those without an exponent of their own, and the first ones that have one, are another way through the tables."""


def expert(hidden: int, inner: int, codes: str, seed: int = 0) -> Blocks:
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    gate, up, down = (drawn(*size, CODES[codes], seed + i) for i, size in enumerate(sizes))
    return gate, up, down


def exact(x: Tensor, blocks: Blocks) -> Tensor:
    """float64; activations are rounded to bfloat16, as the library's are."""
    gate, up, down = (one.dequantised().double() for one in blocks)
    middle = (F.silu(x.double() @ gate.t()) * (x.double() @ up.t())).to(BF16)
    return middle.double() @ down.t()


def packed_in(ops: Ops, hidden: int, inner: int, *experts: Blocks) -> PackedExperts:
    packed = ops.empty_experts(len(experts), hidden, inner, BF16, fp8=True)
    for slot, blocks in enumerate(experts):
        ops.set_expert_fp8(packed, slot, *blocks)
    return packed


def through(ops: Ops, packed: PackedExperts, x: Tensor, slot: int) -> Tensor:
    out = torch.full(x.shape, float("nan"))
    slots = torch.full((len(x), 1), slot, dtype=torch.int32)
    ops.expert_ffn(x, slots, torch.ones(len(x), 1), packed, out)
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codes", CODES)
def test_every_code_is_multiplied_as_the_number_that_it_is(
    ops: Ops, shape: tuple[int, int], codes: str
) -> None:
    hidden, inner = shape
    experts = expert(hidden, inner, codes), expert(hidden, inner, codes, seed=9)
    packed = packed_in(ops, hidden, inner, *experts)
    for rows in (1, 2, 5, 33, 70):
        x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows)).to(BF16)
        for slot, blocks in enumerate(experts):
            wanted = exact(x, blocks)
            error = (through(ops, packed, x, slot).double() - wanted).norm() / wanted.norm()
            assert error < 4e-3, (rows, slot)


def test_a_row_has_the_same_bits_whoever_is_beside_it(ops: Ops) -> None:
    packed = packed_in(ops, 160, 136, expert(160, 136, "all"))
    x = torch.randn(70, 160, generator=torch.Generator().manual_seed(1)).to(BF16)
    together = through(ops, packed, x, 0)
    for count in (1, 3, 16, 33):
        assert torch.equal(through(ops, packed, x[:count], 0), together[:count])


def test_a_code_that_is_no_number_makes_no_number_of_the_row(ops: Ops) -> None:
    gate, up, down = expert(256, 128, "all")
    down.q_OI.view(torch.uint8)[5, 7] = 0x7F
    packed = packed_in(ops, 256, 128, (gate, up, down), expert(256, 128, "all"))
    x = torch.ones(1, 256, dtype=BF16)
    assert through(ops, packed, x, 0)[0, 5].isnan() and through(ops, packed, x, 1).isfinite().all()


def test_weights_that_are_not_in_blocks_come_as_near_as_blocks_can(ops: Ops) -> None:
    """As those of an expert that a checkpoint left in 16 bits."""
    g = torch.Generator().manual_seed(2)
    both, down = (
        (torch.randn(272, 160, generator=g) / 12).to(BF16),
        (torch.randn(160, 136, generator=g) / 12).to(BF16),
    )
    packed = ops.empty_experts(1, 160, 136, BF16, fp8=True)
    ops.set_expert(packed, 0, both, down)
    x = torch.randn(3, 160, generator=g).to(BF16)
    gate, up = map(quantised_blocks, both.chunk(2))
    wanted = exact(x, (gate, up, quantised_blocks(down)))
    assert (through(ops, packed, x, 0).double() - wanted).norm() / wanted.norm() < 4e-3


def test_slots_take_turns_in_less_memory(ops: Ops) -> None:
    experts = [expert(160, 136, "all", seed) for seed in (0, 9)]
    packed = ops.empty_experts(2, 160, 136, BF16, fp8=True, places=1)
    x = torch.ones(1, 160, dtype=BF16)
    for slot, blocks in enumerate(experts):
        ops.put_expert(packed, 1 - slot, None)
        ops.put_expert(packed, slot, 0)
        ops.set_expert_fp8(packed, slot, *blocks)
        wanted = exact(x, blocks)
        assert (through(ops, packed, x, slot).double() - wanted).norm() / wanted.norm() < 4e-3
