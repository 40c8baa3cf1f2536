"""Expert FFN with int4 weights: against float64 with the values that the codes have, and the same bits in any batch."""

import pytest
import torch
from torch import Tensor

from afserve.kernels.grouped import Grouped, Groups, groups_of, int4_rounded, quantised_groups
from afserve.kernels.ops import Ops
from tests.kernels.packing import rows_of_codes
from tests.kernels.test_native_experts import exact, routing, tolerance, weights

pytestmark = pytest.mark.by_day(2)

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(3, 100, 40), (2, 288, 160), (2, 33, 17)]
GROUPS = [Groups(32), Groups(64, wide=True), Groups(128), Groups(1024)]
E2M1_TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def packed_int4(ops: Ops, up_EJH: Tensor, down_EHI: Tensor, groups: Groups) -> object:
    experts, hidden, inner = down_EHI.shape
    packed = ops.empty_experts(experts, hidden, inner, down_EHI.dtype, int4=groups)
    for slot in range(experts):
        ops.set_expert(packed, slot, up_EJH[slot], down_EHI[slot])
    return packed


def rounded(weight_EOI: Tensor, groups: Groups) -> Tensor:
    return torch.stack([int4_rounded(weight_OI, groups.size) for weight_OI in weight_EOI])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("groups", GROUPS)
def test_int4_experts_compute_with_the_rounded_weights(
    ops: Ops, shape: tuple[int, int, int], dtype: torch.dtype, groups: Groups
) -> None:
    up, down = weights(*shape, dtype)
    packed = packed_int4(ops, up, down, groups)
    for rows in (1, 7, 33, 70):
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
        slot, weight = routing(rows, shape[0], "one expert" if rows == 70 else "spread")
        out = torch.empty(rows, shape[1])
        ops.expert_ffn(x, slot, weight, packed, out)
        wanted = exact(
            x, slot, weight, rounded(up, groups), rounded(down, groups), rows=rows_of_codes(ops, dtype)
        )
        torch.testing.assert_close(out.double(), wanted, atol=tolerance(dtype), rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [Groups(32), Groups(128, wide=True)])
def test_a_row_does_not_depend_on_the_others_or_on_threads(
    pair: tuple[Ops, Ops], dtype: torch.dtype, groups: Groups
) -> None:
    ops, threaded = pair
    up, down = weights(3, 192, 96, dtype)
    alone, shared = packed_int4(ops, up, down, groups), packed_int4(threaded, up, down, groups)
    x = torch.randn(150, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    slot, weight = routing(150, 3, "spread")
    whole = torch.empty(150, 192)
    threaded.expert_ffn(x, slot, weight, shared, whole)
    for rows in (1, 2, 3, 7, 17, 40):
        part = torch.empty(rows, 192)
        ops.expert_ffn(x[:rows], slot[:rows], weight[:rows], alone, part)
        assert torch.equal(part, whole[:rows])


def drawn_floats(outputs: int, inputs: int, size: int) -> Grouped:
    code = E2M1_TWICE[torch.randint(0, len(E2M1_TWICE), (outputs, inputs))]
    exponent = torch.randint(-7, -4, (outputs, groups_of(inputs, size)))
    return Grouped(code, torch.ldexp(torch.ones(exponent.shape), exponent), size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("groups", [Groups(32, e2m1=True), Groups(96, wide=True, e2m1=True)])
def test_four_bit_floats_are_multiplied_as_they_are(
    pair: tuple[Ops, Ops], shape: tuple[int, int, int], dtype: torch.dtype, groups: Groups
) -> None:
    """With the bits of any batch and number of threads."""
    torch.manual_seed(1)
    experts, hidden, inner = shape
    coded = [
        (drawn_floats(2 * inner, hidden, groups.size), drawn_floats(hidden, inner, groups.size))
        for _ in range(experts)
    ]
    up, down = (torch.stack([both[i].dequantised() for both in coded]) for i in (0, 1))
    x = torch.randn(70, hidden).to(dtype)
    slot, weight = routing(70, experts, "spread")
    made = []
    for ops in pair:
        packed = ops.empty_experts(experts, hidden, inner, dtype, int4=groups)
        for i, both in enumerate(coded):
            ops.set_expert_int4(packed, i, *both)
        for rows in (1, 5, 70):
            out = torch.empty(rows, hidden)
            ops.expert_ffn(x[:rows], slot[:rows], weight[:rows], packed, out)
            wanted = exact(x[:rows], slot[:rows], weight[:rows], up, down, rows=rows_of_codes(ops, dtype))
            torch.testing.assert_close(out.double(), wanted, atol=2 * tolerance(dtype), rtol=1e-2)
            made.append(out)
        with pytest.raises(ValueError, match="filled by set_expert_int4"):
            ops.set_expert(packed, 0, up[0], down[0])
    assert all(torch.equal(part, made[-1][: len(part)]) for part in made)


def test_a_code_that_is_no_four_bit_float_is_named(ops: Ops) -> None:
    packed = ops.empty_experts(1, 64, 32, torch.float32, int4=Groups(e2m1=True))
    up, down = drawn_floats(64, 64, 32), drawn_floats(64, 32, 32)
    up.code_OI[3, 5] = 5
    with pytest.raises(ValueError, match="code 5 is not twice a number of e2m1"):
        ops.set_expert_int4(packed, 0, up, down)


def test_codes_and_wide_scales_of_a_checkpoint_are_kept_as_they_are(ops: Ops) -> None:
    torch.manual_seed(0)
    hidden, inner, size = 128, 64, 64

    def drawn(outputs: int, inputs: int) -> Grouped:
        code = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
        return Grouped(code, torch.rand(outputs, groups_of(inputs, size)) / 30 + 0.01, size)

    up, down = drawn(2 * inner, hidden), drawn(hidden, inner)
    packed = ops.empty_experts(1, hidden, inner, torch.float32, int4=Groups(size, wide=True))
    ops.set_expert_int4(packed, 0, up, down)
    x, out = torch.randn(5, hidden), torch.empty(5, hidden)
    slot, weight = torch.zeros(5, 1, dtype=torch.int32), torch.ones(5, 1)
    ops.expert_ffn(x, slot, weight, packed, out)
    wanted = exact(x, slot, weight, up.dequantised()[None], down.dequantised()[None])
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=1e-4)
    narrow = ops.empty_experts(1, hidden, inner, torch.float32, int4=Groups(size))
    with pytest.raises(ValueError, match="is not a bfloat16 number"):
        ops.set_expert_int4(narrow, 0, up, down)


def test_a_weight_that_is_not_finite_spoils_its_expert_only(ops: Ops) -> None:
    up, down = weights(2, 64, 32, torch.bfloat16)
    up[1, 5, 7] = torch.inf
    packed = packed_int4(ops, up, down, Groups(32))
    x, one = torch.randn(2, 64).bfloat16(), torch.ones(2, 1)
    out = torch.empty(2, 64)
    ops.expert_ffn(x, torch.tensor([[0], [1]], dtype=torch.int32), one, packed, out)
    assert out.isfinite().all(1).tolist() == [True, False]


def test_wrong_groups_are_named(ops: Ops) -> None:
    with pytest.raises(ValueError, match="int4: groups of 48 inputs, expected a multiple of 32"):
        ops.empty_experts(1, 64, 32, torch.float32, int4=Groups(48))
    packed = ops.empty_experts(1, 64, 32, torch.float32, int4=Groups(32))
    other = quantised_groups(torch.randn(64, 64), 64)
    with pytest.raises(ValueError, match="gate_up"):
        ops.set_expert_int4(packed, 0, other, quantised_groups(torch.randn(64, 32)))


@pytest.mark.parametrize("size", [32, 128])
def test_rounding_is_within_half_a_step(size: int) -> None:
    weight = torch.randn(40, 200)
    made = quantised_groups(weight, size)
    assert made.code_OI.min() == -8 and made.code_OI.max() <= 7
    step = made.scale_OG.abs().repeat_interleave(size, 1)[:, :200]
    away = (made.dequantised() - weight).abs()
    assert (
        away <= step * 1.02
    ).all()  # +8 steps do not exist: up to a whole one there, half a step elsewhere
    assert (away <= step * 0.54).float().mean() > 0.97
    relative = away.square().sum() / weight.square().sum()
    assert relative.sqrt() < (0.1 if size == 32 else 0.13)
    assert torch.equal(int4_rounded(made.dequantised(), size), made.dequantised())
    assert torch.equal(int4_rounded(torch.zeros(3, 70), size), torch.zeros(3, 70))
