"""DeepGEMM's products within an expert's FFN: a double with its signature, which multiplies as each chip does."""

import sys
from types import ModuleType

import pytest
import torch

from afserve.errors import ConfigError
from afserve.kernels.devices.cuda import Chip
from afserve.kernels.formats.scaled import GROUP, BlockScaled, quantised_blocks, spread
from afserve.kernels.libraries.library import Libraries
from afserve.kernels.ops import Ops
from afserve.kernels.triton.backend import TritonBackend
from tests.kernels.reference_fp8 import BlockReference
from tests.kernels.triton.declared import expect_declared

H100, B200 = (9, 0), (10, 0)
HIDDEN, INNER, SLOTS = 256, 128, 3
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN")  # of the interpreter
CHIPS = pytest.mark.parametrize("capability", [H100, B200], ids=["hopper", "blackwell"])


class Double:
    """Tiles of 16 places. On Blackwell a scale's mantissa is lost, as where DeepGEMM packs it."""

    def __init__(self, blackwell, spoil):
        self.calls, self.blackwell, self.spoil = [], blackwell, spoil

    def get_mk_alignment_for_contiguous_layout(self):
        return 16

    def m_grouped_fp8_fp4_gemm_nt_contiguous(
        self, a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
        disable_ue8m0_cast=False,
    ):  # fmt: skip
        (rows, scale), (weights, scales) = a, b
        assert (
            rows.is_contiguous()
            and weights.is_contiguous()
            and scales.is_contiguous()
            and scale.stride(0) == 1
        )
        assert grouped_layout.dtype is torch.int32 and len(grouped_layout) == len(rows) == len(scale) == len(
            d
        )
        if self.blackwell:
            scale, scales = (torch.exp2(torch.floor(torch.log2(x))) for x in (scale, scales))
        self.calls.append(tuple(weights.shape))
        wide = rows.float() * scale.repeat_interleave(GROUP, 1)
        for first in range(0, len(rows), 16):
            slot = int(grouped_layout[first])
            assert (grouped_layout[first : first + 16] == slot).all()
            if slot >= 0:
                weight = weights[slot].float() * spread(scales[slot], weights.shape[1:])
                d[first : first + 16] = self.spoil(wide[first : first + 16] @ weight.T)


@pytest.fixture
def opened(monkeypatch, device, fp8):
    """opened(capability, spoil): a backend with the library, and the double."""

    def install(capability, spoil=lambda answer: answer):
        double, module = Double(capability == B200, spoil), ModuleType("deep_gemm")
        module.__version__ = "0.2.5"
        module.get_mk_alignment_for_contiguous_layout = double.get_mk_alignment_for_contiguous_layout
        module.m_grouped_fp8_gemm_nt_contiguous = double.m_grouped_fp8_fp4_gemm_nt_contiguous
        monkeypatch.setitem(sys.modules, "deep_gemm", module)
        monkeypatch.setattr(
            "afserve.kernels.libraries.deep_gemm.chip_of", lambda device: Chip("a chip", capability, 8)
        )
        return TritonBackend(device, 2, libraries=Libraries.open_named("deep-gemm", device)), double

    return install


def blocks(seed, outputs, inputs, powers):
    generator = torch.Generator().manual_seed(seed)
    found = quantised_blocks(torch.randn(outputs, inputs, generator=generator) / inputs**0.5)
    return BlockScaled(found.q_OI, torch.exp2(found.scale.log2().ceil())) if powers else found


def answered(backend, device, powers, hidden=HIDDEN, dtype=torch.bfloat16, rows=7):
    """What a backend's experts answer to rows of which one is no number, over sums of before."""
    ops = Ops(backend, device, 1)
    experts = ops.empty_experts(SLOTS, hidden, INNER, dtype, fp8=True)
    for slot in range(SLOTS):
        sizes = (INNER, hidden), (INNER, hidden), (hidden, INNER)
        given = (blocks(7 * slot + at, *size, powers) for at, size in enumerate(sizes))
        ops.set_expert_fp8(experts, slot, *given)
    generator = torch.Generator().manual_seed(1)
    x_RH = torch.randn(rows, hidden, generator=generator).to(dtype)
    x_RH[4:5, 9] = float("nan")
    slot_RK = torch.tensor([[0, 2], [2, -1], [1, 0], [-1, -1], [0, 1], [2, 1], [0, 2]], dtype=torch.int32)[
        :rows
    ]
    weight_RK = torch.rand(slot_RK.shape, generator=generator)
    out_RH = torch.full((rows, hidden), 0.5)
    tensors = (x.to(device) for x in (x_RH, slot_RK, weight_RK))
    ops.expert_ffn(*tensors, experts, out := out_RH.to(device), add=True)
    return out.cpu()


def expect_near(answer, truth, share):
    """The norm of what they differ by, as a share of the truth's."""
    assert torch.equal(answer.isnan(), truth.isnan())
    apart = (answer - truth).nan_to_num().norm() / truth.nan_to_num().norm()
    assert apart < share, f"{apart:.3g} apart"


@CHIPS
def test_products_are_the_librarys(opened, device, capability):
    backend, double = opened(capability)
    answer = answered(backend, device, powers=capability == B200)
    products = [(2, 2 * INNER, HIDDEN), (2, HIDDEN, INNER)]
    assert double.calls == [*products, *((SLOTS, *size[1:]) for size in products)]
    truth = answered(BlockReference(), torch.device("cpu"), capability == B200)
    # the reference's own rounding of rows is 0.05 from float32; Blackwell's scales make other codes of most
    expect_near(answer, truth, 0.09 if capability == B200 else 0.015)
    assert backend.explain().endswith("sgl-deep-gemm 0.2.5 computes expert_ffn")
    answered(backend, device, powers=capability == B200, rows=0)
    assert len(double.calls) == 4


def tenth(answer):
    return answer * 1.1


def raises(answer):
    raise RuntimeError("CUDA driver error: no kernel image")


@CHIPS
@pytest.mark.parametrize("spoil", [tenth, raises])
def test_wrong_answers_and_failures_are_our_own(opened, device, capability, spoil):
    own = answered(TritonBackend(device, 2), device, powers=True)
    backend, double = opened(capability, spoil)
    torch.testing.assert_close(answered(backend, device, powers=True), own, rtol=0, atol=0, equal_nan=True)
    assert "expert_ffn of FP8 experts of 256 x 128 not: " in backend.explain()
    backend, double = opened(capability)
    answered(backend, device, powers=True)
    double.spoil = raises
    torch.testing.assert_close(answered(backend, device, powers=True), own, rtol=0, atol=0, equal_nan=True)
    assert "while serving: RuntimeError: CUDA driver error" in backend.explain()


def test_what_does_not_fit_is_our_own(opened, device):
    """Scales that Blackwell cannot multiply by, rows of 16 other bits, and sizes that end within a block."""
    backend, double = opened(B200)
    own = TritonBackend(device, 2)
    for told, asked in (
        ("scales are no powers of two", {"powers": False}),
        ("torch.float16 rows", {"powers": True, "dtype": torch.float16, "hidden": 384}),
        ("no multiples of 128", {"powers": True, "hidden": 192}),
    ):
        before = len(double.calls)
        answer, truth = (answered(one, device, **asked) for one in (backend, own))
        torch.testing.assert_close(answer, truth, rtol=0, atol=0, equal_nan=True)
        assert told in backend.explain() and len(double.calls) <= before + 2


def test_other_chips_have_no_such_products(opened):
    with pytest.raises(
        ConfigError, match=r"deep-gemm is for 9.0 and 10.0, and a chip is compute capability 8.9"
    ):
        opened((8, 9))


def test_a_library_without_its_calls_is_not_opened(monkeypatch, device):
    """As where its compiled part has no products for these chips."""
    module = ModuleType("deep_gemm")
    module.__version__ = "0.2.5"
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setattr("afserve.kernels.libraries.deep_gemm.chip_of", lambda device: Chip("a chip", H100, 8))
    with pytest.raises(ConfigError, match=r"deep-gemm cannot be imported .*get_mk_alignment"):
        Libraries.open_named("deep-gemm", device)


def test_the_double_is_called_as_the_library_is():
    expect_declared(Double.m_grouped_fp8_fp4_gemm_nt_contiguous, "deep_gemm", "__init__.py")
    expect_declared(Double.get_mk_alignment_for_contiguous_layout, "deep_gemm", "utils/layout.py")
