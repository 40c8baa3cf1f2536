"""Weights in fewer bits. Compact bf16 takes 12, and not one bit of a result is different from the whole weights'."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.by_day(2)

_native = pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
WHOLE, INT8, COMPACT, FLOAT = 1, 2, 3, 0
ISAS = ("amx", "avx512bf16fma", "avx512bf16", "avx512", "avx2")


def engine(isa: str) -> "_native.Engine":
    try:
        made = _native.Engine(2, isa)
    except ValueError as error:
        pytest.skip(str(error))
    return made


def product(made: "_native.Engine", x_TI: Tensor, weight_OI: Tensor, kept: int) -> tuple[Tensor, int]:
    outputs, inputs = weight_OI.shape
    packed = _native.Linear(outputs, inputs, kept)
    packed.pack(weight_OI.data_ptr(), WHOLE, inputs)
    out = torch.empty(x_TI.shape[0], outputs)
    packed.run(made, x_TI.data_ptr(), inputs, x_TI.shape[0], WHOLE, out.data_ptr(), FLOAT)
    return out, packed.bytes


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def drawn(kind: str, shape: tuple[int, int]) -> Tensor:
    g = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    if kind == "trained":
        return (torch.randn(shape, generator=g) * 0.02).bfloat16()
    if kind == "sparse":
        return torch.where(
            torch.rand(shape, generator=g) < 0.9, 0.0, torch.randn(shape, generator=g)
        ).bfloat16()
    # Every exponent alike: no 16 high bytes cover them. Infinities and NaNs are left out, as no checkpoint has them.
    power = torch.randint(-100, 60, shape, generator=g).float()
    return (torch.randn(shape, generator=g).sign() * torch.exp2(power)).bfloat16()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["trained", "sparse", "every exponent"])
@pytest.mark.parametrize("shape", [(64, 32), (70, 100), (1, 1), (130, 544), (17, 600)])
def test_products_have_the_bits_of_whole_weights(isa: str, kind: str, shape: tuple[int, int]) -> None:
    made, weight = engine(isa), drawn(kind, shape)
    for rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 24, 25, 33, 130):
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).bfloat16()
        whole, compact = (product(made, x, weight, kept)[0] for kept in (WHOLE, COMPACT))
        assert same_bits(whole, compact), (rows, shape)


@pytest.mark.parametrize("isa", ["", "avx2"])
@settings(max_examples=60, deadline=None)
@given(
    place=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 95)), max_size=40),
    bits=st.integers(0, 65535).filter(lambda b: b & 0x7F80 != 0x7F80),
)
def test_any_weight_anywhere_survives(isa: str, place: list[tuple[int, int]], bits: int) -> None:
    made = engine(isa)
    if not made.compacts:
        pytest.skip("no instruction set here expands compact weights")
    weight = drawn("trained", (64, 96))
    for row, column in place:
        weight.view(torch.int16)[row, column] = bits - 65536 if bits > 32767 else bits
    one = torch.eye(96).bfloat16()  # each row of the product is one column of the weights
    for rows in (96, 16, 6, 4, 3, 2, 1):
        for x in one.split(rows):
            assert same_bits(product(made, x, weight, WHOLE)[0], product(made, x, weight, COMPACT)[0])


def test_trained_weights_take_three_quarters() -> None:
    made, weight = engine("avx2"), drawn("trained", (512, 512))
    x = torch.ones(1, 512).bfloat16()
    whole, compact = (product(made, x, weight, kept)[1] for kept in (WHOLE, COMPACT))
    assert compact <= 0.76 * whole


def test_experts_filled_again_forget_their_patches() -> None:
    made = engine("avx2")
    x, slot, share = torch.randn(3, 64).bfloat16(), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)

    def out(kept: int, kinds: tuple[str, ...]) -> Tensor:
        packed, result = _native.Experts(1, 64, 32, kept, False, None), torch.empty(3, 64)
        for kind in kinds:
            up, down = drawn(kind, (64, 64)), drawn(kind, (64, 32))
            packed.pack(0, up.data_ptr(), 64, down.data_ptr(), 32, WHOLE)
        packed.run(
            made,
            x.data_ptr(),
            64,
            WHOLE,
            slot.data_ptr(),
            share.data_ptr(),
            3,
            1,
            result.data_ptr(),
            64,
            FLOAT,
            False,
        )
        return result

    assert same_bits(out(COMPACT, ("every exponent", "sparse", "trained")), out(WHOLE, ("trained",)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(64, 32), (70, 100), (130, 544)])
def test_a_row_of_int8_has_the_same_bits_with_any_number_of_others(isa: str, shape: tuple[int, int]) -> None:
    made, weight = engine(isa), drawn("trained", shape)
    x = torch.randn(40, shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    together = product(made, x, weight, INT8)[0]
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 24, 25):
        parts = [product(made, part, weight, INT8)[0] for part in x.split(rows)]
        assert same_bits(torch.cat(parts), together), (rows, shape)
