"""Products with weights of ggml's types, as they are stored: against float64 with the numbers that they stand for, the
same bits in any batch, and the memory of the file."""

import pytest
import torch
from torch import Tensor

from afserve.gguf.kinds import PACKED
from afserve.kernels.formats.ggml import TYPES, GgmlRows, joined, panel_types
from afserve.kernels.ops import Ops
from afserve.kernels.packed import ExpertShape, Gating
from afserve.models.blocks import unblocked
from tests.kernels.packing import rows_of_codes
from tests.kernels.test_native_experts import exact, routing, tolerance

pytestmark = pytest.mark.by_day(2)

DTYPES = [torch.float32, torch.bfloat16]
SCALES_AT = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}  # of a block's bytes, float16
PRECISION = {
    torch.float32: 2e-6,
    torch.bfloat16: 6e-5,
}  # of a sum of magnitudes: rows have 16 bits where bytes are multiplied


def drawn(kind: str, outputs: int, inputs: int, seed: int = 0, largest: float = 0.02) -> GgmlRows:
    """Any codes, minima and scales of few bits; scales of blocks are of either sign."""
    packed, made = PACKED[kind], torch.Generator().manual_seed(seed)
    blocks = outputs * inputs // packed.numbers
    bytes_NB = torch.randint(0, 256, (blocks, packed.size), generator=made, dtype=torch.uint8)
    for at in SCALES_AT.get(kind, (0,)):
        scale = (torch.rand(blocks, 1, generator=made) - 0.5) * 2 * largest
        bytes_NB[:, at : at + 2] = scale.half().view(torch.uint8)
    return GgmlRows(kind, bytes_NB.view(outputs, -1), inputs)


def usual(kind: str, outputs: int, inputs: int, seed: int) -> GgmlRows:
    """Numbers as large as those of `weights` in the tests of experts."""
    drawn_size = numbers(drawn(kind, outputs, inputs, seed)).std().item()
    return drawn(kind, outputs, inputs, seed, 0.02 / drawn_size / inputs**0.5)


def numbers(rows: GgmlRows) -> Tensor:
    return unblocked(rows.bytes_RB, rows.kind)


def door(ops: Ops):
    assert ops.ggml is not None
    return ops.ggml


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_multiply_what_is_stored(ops: Ops, kind: str, dtype: torch.dtype) -> None:
    for outputs, inputs in ((64, 256), (100, 512), (7, 768)):
        rows = drawn(kind, outputs, inputs)
        packed = door(ops).pack_linear([rows], torch.ones(outputs), dtype)
        weight = numbers(rows).double()
        for count in (1, 2, 3, 5, 17, 70):
            x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(dtype)
            given = rows_of_codes(ops, dtype)(x)
            wanted = given @ weight.T + 1
            bound = PRECISION[dtype] * (given.abs() @ weight.abs().T + 1)
            found = ops.logits(x, packed).double()
            assert ((found - wanted).abs() <= bound).all(), (outputs, count)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_of_32_may_end_anywhere(ops: Ops, kind: str) -> None:
    if PACKED[kind].numbers > 32:
        with pytest.raises(ValueError, match="are no multiple of 256"):
            door(ops).pack_linear(
                [GgmlRows(kind, torch.zeros(4, 80, dtype=torch.uint8), 96)], None, torch.bfloat16
            )
        return
    for inputs in (32, 96, 288):
        rows = drawn(kind, 70, inputs)
        packed = door(ops).pack_linear([rows], None, torch.bfloat16)
        x = torch.randn(3, inputs).to(torch.bfloat16)
        given = rows_of_codes(ops, x.dtype)(x)
        wanted = given @ numbers(rows).double().T
        bound = PRECISION[torch.bfloat16] * (given.abs() @ numbers(rows).double().abs().T)
        assert ((ops.logits(x, packed).double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_map_have_types_of_their_own(ops: Ops, dtype: torch.dtype) -> None:
    """As q and k of one, v of another: rows of one type that follow each other may end anywhere."""
    parts = [drawn("Q4_K", 100, 256, 1), drawn("Q4_K", 28, 256, 2), drawn("Q6_K", 50, 256, 3)]
    packed = door(ops).pack_linear(parts, None, dtype)
    weight = torch.cat([numbers(part) for part in parts]).double()
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    given = rows_of_codes(ops, dtype)(x)
    bound = PRECISION[dtype] * (given.abs() @ weight.abs().T)
    assert ((ops.logits(x, packed).double() - given @ weight.T).abs() <= bound).all()
    assert panel_types(joined(parts)) == [TYPES.index("Q4_K")] * 2 + [TYPES.index("Q6_K")]
    assert panel_types(joined(parts[1:])) is None
    with pytest.raises(ValueError, match="share 64 outputs"):
        door(ops).pack_linear(parts[1:], None, dtype)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others_or_on_threads(
    pair: tuple[Ops, Ops], kind: str, dtype: torch.dtype
) -> None:
    rows = drawn(kind, 130, 512)
    alone, shared = (door(ops).pack_linear([rows], None, dtype) for ops in pair)
    x = torch.randn(150, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = pair[1].logits(x, shared)
    for count in (1, 2, 3, 4, 5, 7, 17, 33, 40):
        assert torch.equal(pair[0].logits(x[:count], alone), whole[:count])
    for row in (0, 31, 149):
        assert torch.equal(pair[0].logits(x[row : row + 1], alone), whole[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q8_0", "Q8_0"), ("Q5_K", "Q5_0"), ("Q4_0", "Q4_0")])
def test_experts_multiply_what_is_stored(
    pair: tuple[Ops, Ops], kinds: tuple[str, str], dtype: torch.dtype
) -> None:
    """With the bits of any batch and number of threads; gate and up have one type, down another."""
    experts, hidden, inner = 3, 256, 256
    up = [usual(kinds[0], 2 * inner, hidden, slot) for slot in range(experts)]
    down = [usual(kinds[1], hidden, inner, slot + 9) for slot in range(experts)]
    x = torch.randn(70, hidden, generator=torch.Generator().manual_seed(3)).to(dtype)
    slot, weight = routing(70, experts, "spread")
    used = [torch.stack([numbers(one) for one in part]) for part in (up, down)]
    wanted = exact(x, slot, weight, *used, rows=rows_of_codes(pair[0], dtype))
    made = []
    for ops in pair:
        packed = door(ops).empty_experts(ExpertShape(experts, hidden, inner, dtype), kinds)
        for i in range(experts):
            door(ops).set_expert(packed, i, up[i], down[i])
        for rows in (1, 5, 70):
            out = torch.empty(rows, hidden)
            ops.expert_ffn(x[:rows], slot[:rows], weight[:rows], packed, out)
            torch.testing.assert_close(out.double(), wanted[:rows], atol=2 * tolerance(dtype), rtol=1e-2)
            made.append(out)
    assert all(torch.equal(part, made[-1][: len(part)]) for part in made)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_an_embedding_are_the_numbers_of_its_blocks(ops: Ops, kind: str, dtype: torch.dtype) -> None:
    table, token = drawn(kind, 90, 768), torch.tensor([3, 89, 3, 0, *range(20, 50)])
    assert torch.equal(door(ops).rows_of(table, token, dtype), numbers(table)[token].to(dtype))
    with pytest.raises(IndexError, match="token 90: the embedding has 90 rows"):
        door(ops).rows_of(table, torch.tensor([90]), dtype)


@pytest.mark.parametrize("kind", TYPES)
def test_weights_take_the_bytes_of_the_file(ops: Ops, kind: str) -> None:
    rows = drawn(kind, 128, 512)
    assert rows.bits == 8 * PACKED[kind].size / PACKED[kind].numbers
    packed = door(ops).pack_linear([rows], None, torch.bfloat16)
    assert packed.handle.bytes == rows.bytes_RB.numel()
    shape = ExpertShape(5, 256, 256, torch.bfloat16, places=2)
    experts = door(ops).empty_experts(shape, (kind, kind))
    assert experts.handle.bytes == 2 * 3 * 256 * 256 * rows.bits / 8


def test_biases_gating_and_places_go_with_them(ops: Ops, truth: Ops) -> None:
    gating, (hidden, inner) = Gating(7.0, 1.7), (64, 96)
    shape = ExpertShape(4, hidden, inner, torch.float32, bias=True, gating=gating, places=1)
    packed = door(ops).empty_experts(shape, ("Q8_0", "Q5_0"))
    up, down = drawn("Q8_0", 2 * inner, hidden, 1, 0.002), drawn("Q5_0", hidden, inner, 2)
    biases = torch.randn(2 * inner), torch.randn(hidden)
    ops.put_expert(packed, 2, 0)
    door(ops).set_expert(packed, 2, up, down, biases)
    plain = truth.empty_experts(4, hidden, inner, torch.float32, bias=True, gating=gating)
    truth.set_expert(plain, 2, numbers(up), numbers(down), *biases)
    x, slot, weight = torch.randn(3, hidden), torch.full((3, 1), 2), torch.ones(3, 1)
    found, wanted = torch.empty(3, hidden), torch.empty(3, hidden)
    ops.expert_ffn(x, slot, weight, packed, found)
    truth.expert_ffn(x, slot, weight, plain, wanted)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_what_does_not_fit_is_named(ops: Ops) -> None:
    packed = door(ops).empty_experts(ExpertShape(2, 64, 32, torch.float32), ("Q8_0", "Q8_0"))
    up, down = drawn("Q8_0", 64, 64), drawn("Q8_0", 64, 32)
    with pytest.raises(ValueError, match="down: 64 x 32 of Q4_0, expected 64 x 32 of Q8_0"):
        door(ops).set_expert(packed, 0, up, drawn("Q4_0", 64, 32))
    with pytest.raises(ValueError, match="gate_up: 32 x 64 of Q8_0, expected 64 x 64"):
        door(ops).set_expert(packed, 0, up[:32], down)
    with pytest.raises(ValueError, match="slot: 2, there are 2 slots"):
        door(ops).set_expert(packed, 2, up, down)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_spoils_its_own_row_or_column_alone(
    ops: Ops, kind: str, dtype: torch.dtype
) -> None:
    rows = drawn(kind, 64, 256)
    for at in SCALES_AT.get(kind, (0,)):
        rows.bytes_RB[5, at : at + 2] = torch.tensor([torch.nan]).half().view(torch.uint8)
    x = torch.randn(6, 256).to(dtype)
    packed = door(ops).pack_linear([rows], None, dtype)
    whole = ops.logits(x, packed)
    assert whole[:, 5].isnan().all() and whole[:, :5].isfinite().all() and whole[:, 6:].isfinite().all()
    x[2, 7] = torch.inf
    spoilt = ops.logits(x, packed)
    assert not spoilt[2].isfinite().any()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(spoilt[others].nan_to_num(0), whole[others].nan_to_num(0))
