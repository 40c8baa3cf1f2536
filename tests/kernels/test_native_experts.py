"""Expert FFN and dense linear of the native library against float64, and their batch invariance."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from afserve.kernels.grouped import Groups, int4_rounded, int8_rounded
from afserve.kernels.isa import isas_here
from afserve.kernels.ops import Ops, open_ops
from afserve.kernels.packed import SWIGLU, Gating
from tests.kernels.packing import pack_experts, rows_of_codes

pytestmark = pytest.mark.by_day(2)

SHAPES = [(4, 64, 32), (5, 100, 40), (3, 33, 17), (2, 128, 96)]
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [0, 1, 2, 5, 16, 17, 31, 33, 70]
CLAMPED = Gating(1.0, 1.702)
BOUNDED = Gating(0.3, bounded=True)
SQUARED = Gating(squared=True)
GELU = Gating(gelu=True)


def weights(experts: int, hidden: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(experts * hidden + inner)
    up = torch.randn(experts, 2 * inner, hidden, generator=g) / hidden**0.5
    down = torch.randn(experts, hidden, inner, generator=g) / inner**0.5
    return up.to(dtype), down.to(dtype)


def routing(rows: int, experts: int, kind: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    weight = torch.rand(rows, 2, generator=g)
    if kind == "one expert":
        return torch.full((rows, 2), experts - 1, dtype=torch.int32), weight
    slot = torch.rand(rows, experts, generator=g).argsort(-1)[:, :2].int()
    if kind == "skipped":
        slot[::2, 1] = -1
    return slot, weight


def exact(
    x: Tensor,
    slot: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    biases: tuple[Tensor, Tensor] | None = None,
    gating: Gating = SWIGLU,
    rows: Callable[[Tensor], Tensor] = Tensor.double,
) -> Tensor:
    """`rows`: what the products' rows are rounded to."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    up_bias, down_bias = (torch.zeros(m.shape[:2]) for m in (up, down)) if biases is None else biases
    for s in range(up.shape[0]):
        both = rows(x) @ up[s].double().t() + up_bias[s].double()
        share = torch.where(slot == s, weight, 0).sum(1, dtype=torch.float64)
        out += share[:, None] * (rows(gating.join(both)) @ down[s].double().t() + down_bias[s].double())
    return out


def tolerance(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 2e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["spread", "one expert", "skipped"])
def test_expert_ffn_is_close_to_float64(
    ops: Ops, shape: tuple[int, int, int], dtype: torch.dtype, kind: str
) -> None:
    up, down = weights(*shape, dtype)
    packed = pack_experts(ops, up, down)
    for rows in ROWS:
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
        slot, weight = routing(rows, shape[0], kind)
        out = torch.full((rows, shape[1]), float("nan"))
        ops.expert_ffn(x, slot, weight, packed, out)
        torch.testing.assert_close(
            out.double(), exact(x, slot, weight, up, down), atol=tolerance(dtype), rtol=1e-2
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kept", ["whole", "int8", "int4"])
@pytest.mark.parametrize(
    ("bias", "gating"),
    [(True, SWIGLU), (False, CLAMPED), (True, CLAMPED), (False, BOUNDED), (True, SQUARED), (False, GELU)],
)
def test_biases_and_a_clamped_swiglu(
    ops: Ops, shape: tuple[int, int, int], dtype: torch.dtype, kept: str, bias: bool, gating: Gating
) -> None:
    """As gpt-oss has them, whatever weights are kept in. Sums leave the bounds on both sides."""
    up, down = weights(*shape, dtype)
    up = up[:, : gating.projections * shape[2]]
    given = tuple(torch.randn(m.shape[:2], generator=torch.Generator().manual_seed(8)) for m in (up, down))
    packed = ops.empty_experts(
        *shape,
        dtype,
        int8=kept == "int8",
        bias=bias,
        gating=gating,
        int4=Groups() if kept == "int4" else None,
    )
    for slot in range(shape[0]):
        ops.set_expert(packed, slot, up[slot], down[slot], *((b[slot] for b in given) if bias else ()))
    rounded = {
        "whole": Tensor.float,
        "int8": int8_rounded,
        "int4": lambda m: torch.stack([*map(int4_rounded, m)]),
    }
    kept_up, kept_down = rounded[kept](up), rounded[kept](down)
    of_rows = Tensor.double if kept == "whole" else rows_of_codes(ops, dtype, kept == "int8")
    for rows in (1, 5, 33):
        x = 2 * torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
        slot, weight = routing(rows, shape[0], "skipped")
        out = torch.full((rows, shape[1]), float("nan"))
        ops.expert_ffn(x, slot, weight, packed, out)
        wanted = exact(x, slot, weight, kept_up, kept_down, given if bias else None, gating, of_rows)
        torch.testing.assert_close(out.double(), wanted, atol=3 * tolerance(dtype), rtol=2e-2)


@pytest.mark.parametrize("gating", [CLAMPED, SQUARED, GELU])
def test_a_row_that_is_no_number_stays_none_whatever_joins(ops: Ops, gating: Gating) -> None:
    up, down = weights(2, 64, 32, torch.float32)
    up = up[:, : 32 * gating.projections]
    packed = ops.empty_experts(2, 64, 32, torch.float32, gating=gating)
    for slot in range(2):
        ops.set_expert(packed, slot, up[slot], down[slot])
    x = torch.ones(2, 64)
    x[1, 3] = float("nan")
    out = torch.empty(2, 64)
    ops.expert_ffn(x, torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), packed, out)
    assert out[0].isfinite().all() and out[1].isnan().all()


def test_slots_have_both_biases_or_none(ops: Ops) -> None:
    up, down = weights(1, 64, 32, torch.float32)
    with pytest.raises(ValueError, match="are set whole"):
        ops.set_half(ops.empty_experts(1, 64, 32, torch.float32, bias=True), 0, down_HI=down[0])
    with pytest.raises(ValueError, match=r"gate_up: shape \(31, 64\)"):
        ops.set_half(ops.empty_experts(1, 64, 32, torch.float32), 0, [up[0, :31], up[0, :31]])
    plain = ops.empty_experts(1, 64, 32, torch.float32)
    biased = ops.empty_experts(1, 64, 32, torch.float32, bias=True)
    with pytest.raises(ValueError, match="both biases or none"):
        ops.set_expert(plain, 0, up[0], down[0], torch.zeros(64), torch.zeros(64))
    with pytest.raises(ValueError, match="both biases or none"):
        ops.set_expert(biased, 0, up[0], down[0])
    with pytest.raises(ValueError, match=r"down_bias_H: shape \(3,\)"):
        ops.set_expert(biased, 0, up[0], down[0], torch.zeros(64), torch.zeros(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_experts_compute_with_the_rounded_weights(ops: Ops, dtype: torch.dtype) -> None:
    up, down = weights(3, 100, 40, dtype)
    packed = pack_experts(ops, up, down, int8=True)
    for rows in (1, 7, 33):
        x = torch.randn(rows, 100, generator=torch.Generator().manual_seed(rows)).to(dtype)
        slot, weight = routing(rows, 3, "spread")
        out = torch.empty(rows, 100)
        ops.expert_ffn(x, slot, weight, packed, out)
        wanted = exact(
            x, slot, weight, int8_rounded(up), int8_rounded(down), rows=rows_of_codes(ops, dtype, True)
        )
        torch.testing.assert_close(out.double(), wanted, atol=tolerance(dtype), rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("gating", [SWIGLU, GELU])
def test_a_row_does_not_depend_on_the_others_or_on_threads(
    pair: tuple[Ops, Ops], dtype: torch.dtype, int8: bool, gating: Gating
) -> None:
    ops, threaded = pair
    up, down = weights(4, 96, 64, dtype)
    alone, shared = (pack_experts(held, up, down, int8, gating) for held in pair)
    x = torch.randn(150, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    slot, weight = routing(150, 4, "spread")
    whole = torch.empty(150, 96)
    threaded.expert_ffn(x, slot, weight, shared, whole)
    for rows in (1, 3, 17, 40):
        part = torch.empty(rows, 96)
        ops.expert_ffn(x[:rows], slot[:rows], weight[:rows], alone, part)
        assert torch.equal(part, whole[:rows])


def test_int8_products_have_the_same_bits_whichever_instruction_multiplies_bytes() -> None:
    """Sums of whole numbers are exact, whatever the order, and AMX and VNNI scale them alike."""
    weight = torch.randn(130, 1000, generator=torch.Generator().manual_seed(4)).bfloat16()
    x = torch.randn(37, 1000, generator=torch.Generator().manual_seed(5)).bfloat16()
    sets = [isa for isa in ("amx", "avx512bf16", "avx512") if isa in isas_here()]
    if len(sets) < 2:
        pytest.skip(f"this processor has {', '.join(isas_here())}")
    opened = [open_ops("cpu", 1, "native", isa) for isa in sets]
    first, *others = [ops.logits(x, ops.pack_linear(weight, None, True)) for ops in opened]
    assert all(torch.equal(first, other) for other in others)


def test_rows_times_int8_weights_lose_less_than_bfloat16_would(ops: Ops) -> None:
    """Also rows with a number a thousand times the others, which takes most of a row's 16 bits, tiny ones and zeros.
    With AVX2 that is beside what 8 bits for every 32 numbers lose."""
    g = torch.Generator().manual_seed(6)
    weight = torch.randn(64, 512, generator=g).bfloat16()
    x = torch.randn(6, 512, generator=g)
    x[1, 7], x[2], x[3], x[4] = 3000.0, x[2] * 1e-20, 0.0, x[4] * 1e-37
    x[5, ::2] = 0.0
    x = x.bfloat16()
    made = ops.logits(x, ops.pack_linear(weight, None, True)).double()
    wanted = rows_of_codes(ops, x.dtype, True)(x) @ int8_rounded(weight).double().t()
    size = wanted.square().mean(1).sqrt()
    assert ((made - wanted).abs().amax(1) <= size * 2.0**-9 + 1e-30).all()
    assert torch.equal(made[3], torch.zeros(64, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_add_starts_from_what_is_there(ops: Ops, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    up, down = weights(4, 64, 32, dtype)
    packed = pack_experts(ops, up, down)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    slot, weight = routing(6, 4, "spread")
    out = torch.ones(6, 64, dtype=out_dtype)
    ops.expert_ffn(x, slot, weight, packed, out, add=True)
    wanted = exact(x, slot, weight, up, down) + 1
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)


def test_strided_rows_and_other_index_types_are_accepted(ops: Ops) -> None:
    up, down = weights(4, 64, 32, torch.bfloat16)
    packed = pack_experts(ops, up, down)
    x = torch.randn(6, 200).bfloat16()[:, 50:114]
    slot, weight = routing(6, 4, "spread")
    first, second = torch.empty(6, 64), torch.empty(6, 128)[:, ::2]
    ops.expert_ffn(x, slot, weight, packed, first)
    ops.expert_ffn(x, slot.long(), weight.double(), packed, second)
    assert torch.equal(first, second)


def test_a_slot_that_does_not_exist_is_named(ops: Ops) -> None:
    up, down = weights(4, 64, 32, torch.float32)
    packed = pack_experts(ops, up, down)
    slot = torch.tensor([[0, 1], [4, 0]], dtype=torch.int32)
    with pytest.raises(IndexError, match=r"slot_RK: slot 4 in row 1, there are 4 slots"):
        ops.expert_ffn(torch.zeros(2, 64), slot, torch.ones(2, 2), packed, torch.empty(2, 64))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("halves", [False, True])
def test_set_expert_replaces_one_slot_only(ops: Ops, halves: bool, dtype: torch.dtype, int8: bool) -> None:
    """In one call, or down first, and gate and up from tensors of their own: the same bits."""
    up, down = weights(3, 64, 40, dtype)
    packed = ops.empty_experts(3, 64, 40, dtype, int8)
    x, one = torch.randn(1, 64).to(dtype), torch.ones(1, 1)
    for slot in range(3):
        ops.set_expert(packed, slot, up[slot], down[slot])
    if halves:
        ops.set_half(packed, 1, down_HI=down[0])
        ops.set_half(packed, 1, [part.clone() for part in up[0].chunk(2)])
    else:
        ops.set_expert(packed, 1, up[0], down[0])
    outs = []
    for slot in range(3):
        out = torch.empty(1, 64, dtype=dtype)
        ops.expert_ffn(x, torch.tensor([[slot]], dtype=torch.int32), one, packed, out)
        outs.append(out)
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (100, 33), (7, 128), (200, 96)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("int8", [False, True])
def test_linear_is_close_to_float64(
    ops: Ops, shape: tuple[int, int], dtype: torch.dtype, with_bias: bool, int8: bool
) -> None:
    outputs, inputs = shape
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) / inputs**0.5).to(dtype)
    bias = torch.arange(outputs).to(dtype) / outputs if with_bias else None
    packed = ops.pack_linear(weight, bias, int8)
    used = int8_rounded(weight) if int8 else weight
    for rows in (0, 1, 6, 40, 129):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
        given = rows_of_codes(ops, dtype, True)(x) if int8 else x.double()
        wanted = given @ used.double().t() + (0 if bias is None else bias.double())
        out = ops.linear(x, packed)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), wanted, atol=tolerance(dtype), rtol=1e-2)
        torch.testing.assert_close(
            ops.logits(x, packed).double(), wanted, atol=2e-5 if dtype == torch.float32 else 1e-3, rtol=1e-3
        )


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_go_to_a_place_in_memory_only(ops: Ops, dtype: torch.dtype, int8: bool) -> None:
    """Of three experts with memory for one: who has no place is neither written nor multiplied."""
    experts = ops.empty_experts(3, 33, 17, dtype, int8, places=1)
    up, down = torch.ones(34, 33).to(dtype), torch.ones(33, 17).to(dtype)
    with pytest.raises(IndexError, match="has no place in memory"):
        ops.set_expert(experts, 2, up, down)
    ops.put_expert(experts, 2, 0)
    ops.set_expert(experts, 2, up, down)
    with pytest.raises(IndexError, match="slot 1 has no weights in memory"):
        slot, weight = torch.tensor([[1]], dtype=torch.int32), torch.ones(1, 1)
        ops.expert_ffn(torch.ones(1, 33).to(dtype), slot, weight, experts, torch.empty(1, 33).to(dtype))
    with pytest.raises(IndexError, match="place 1 does not exist"):
        ops.put_expert(experts, 1, 1)
