"""Experts with biases and a clamped SwiGLU (gpt-oss), in every form that slots keep weights in, against float64."""

import pytest
import torch

from afserve.kernels.formats.four_bits import exponents
from afserve.kernels.grouped import Groups, int4_rounded, int8_rounded
from afserve.kernels.ops import Ops
from afserve.kernels.packed import SWIGLU, Gating
from afserve.kernels.triton.backend import TritonBackend
from tests.kernels.test_int4 import drawn_floats
from tests.kernels.test_native_experts import exact, routing, weights

pytestmark = pytest.mark.by_day(2)

CLAMPED = Gating(1.0, 1.702)
ROUNDED = {"whole": torch.Tensor.float, "int8": int8_rounded, "int4": int4_rounded}


@pytest.fixture
def ops(device):
    made = Ops(TritonBackend(device, 2, has_fp8=False), device, 1)
    yield made
    assert made.fallbacks() == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", ROUNDED)
@pytest.mark.parametrize(("bias", "gating"), [(True, SWIGLU), (False, CLAMPED), (True, CLAMPED)])
def test_biases_and_a_clamped_swiglu(ops, device, close, dtype, kept, bias, gating):
    slots, hidden, inner = 3, 72, 40
    up, down = weights(slots, hidden, inner, dtype)
    given = tuple(torch.randn(m.shape[:2], generator=torch.Generator().manual_seed(8)) for m in (up, down))
    given = tuple(b.to(dtype).float() for b in given)
    packed = ops.empty_experts(
        slots, hidden, inner, dtype, int8=kept == "int8", bias=bias, gating=gating,
        int4=Groups() if kept == "int4" else None,
    )  # fmt: skip
    for slot in range(slots):
        biases = tuple(b[slot].to(device) for b in given) if bias else ()
        ops.set_expert(packed, slot, up[slot].to(device), down[slot].to(device), *biases)
    x = 2 * torch.randn(21, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    slot, weight = routing(21, slots, "skipped")
    out = torch.full((21, hidden), float("nan"), dtype=dtype, device=device)
    ops.expert_ffn(x.to(device), slot.to(device), weight.to(device), packed, out)
    kept_up, kept_down = (torch.stack([*map(ROUNDED[kept], m)]) for m in (up, down))
    close(out, exact(x, slot, weight, kept_up, kept_down, given if bias else None, gating))


@pytest.mark.parametrize("groups", [Groups(32, e2m1=True), Groups(96, wide=True, e2m1=True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_four_bit_floats(ops, device, close, groups, dtype):
    """Scales are multiplied into the codes of four groups at once, or into the products of one group."""
    torch.manual_seed(1)
    coded = [(drawn_floats(80, 100, groups.size), drawn_floats(100, 40, groups.size)) for _ in range(2)]
    packed = ops.empty_experts(2, 100, 40, dtype, int4=groups)
    for slot, both in enumerate(coded):
        ops.set_expert_int4(packed, slot, *both)
    x, (slot, weight) = torch.randn(9, 100).to(dtype), routing(9, 2, "spread")
    out = torch.empty(9, 100, dtype=dtype, device=device)
    ops.expert_ffn(x.to(device), slot.to(device), weight.to(device), packed, out)
    up, down = (torch.stack([both[i].dequantised() for both in coded]) for i in (0, 1))
    close(out, exact(x, slot, weight, up, down))


def test_scales_of_four_bit_floats_are_exponents(ops, device):
    scale = torch.tensor(
        [1.0, 0.5, 2.0**-126, 2.0**120, 0.0, 2.0**-130, float("nan"), float("inf")], device=device
    )
    assert exponents(scale).tolist() == [127, 126, 1, 247, 0, 0, 255, 255]
    with pytest.raises(ValueError, match="powers of two, and one of these is not"):
        exponents(torch.tensor([1.0, 0.75], device=device))
    packed = ops.empty_experts(2, 64, 32, torch.bfloat16, int4=Groups(32, e2m1=True))
    assert packed.handle.gate_up_scale.element_size() == 1, "4.25 bits of a weight"


def test_a_row_that_is_no_number_stays_none(ops, device):
    up, down = (w.to(device) for w in weights(1, 64, 32, torch.float32))
    packed = ops.empty_experts(1, 64, 32, torch.float32, gating=CLAMPED)
    ops.set_expert(packed, 0, up[0], down[0])
    x = torch.ones(2, 64, device=device)
    x[1, 3] = float("nan")
    out = torch.empty(2, 64, device=device)
    chosen = torch.zeros(2, 1, dtype=torch.int32, device=device), torch.ones(2, 1, device=device)
    ops.expert_ffn(x, *chosen, packed, out)
    assert out[0].isfinite().all() and out[1].isnan().all()
