"""Norms, rotary embedding, cache writes and router choice of the native library against the reference."""

import pytest
import torch
from torch import Tensor

from afserve.kernels.ops import Ops
from afserve.kernels.routing import RouterRule, Scoring, Selection

pytestmark = pytest.mark.by_day(2)

DTYPES = [torch.float32, torch.bfloat16]
RULES = [
    RouterRule(4, Scoring.SOFTMAX, renormalise=True),
    RouterRule(2, Scoring.SOFTMAX, scale=2.5),
    RouterRule(3, Scoring.TOPK_SOFTMAX),
    RouterRule(4, Scoring.SIGMOID, Selection.GROUP_TOP2_SUM, 4, 2, True, 1e-20, 2.5),
    RouterRule(4, Scoring.SOFTMAX, Selection.GROUP_MAX, 8, 3, False, 0.0, 16.0, float("-inf")),
    RouterRule(32, Scoring.SIGMOID),
]


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 64, 100, 512])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_rms_norm_with_and_without_residual(
    ops: Ops, truth: Ops, dtype: torch.dtype, size: int, rows: int
) -> None:
    x, y, weight = noise((rows, size), dtype), noise((rows, size), dtype, 1), noise((size,), dtype, 2)
    wanted, out = truth.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 1.6e-2)
    mine, theirs = x.clone(), x.clone()
    normed = ops.add_rms_norm(mine, y, weight, 1e-6)
    truth.add_rms_norm(theirs, y, weight, 1e-6)
    assert torch.equal(mine, theirs)
    assert torch.equal(normed, ops.rms_norm(mine, weight, 1e-6))


def test_rms_norm_of_heads_inside_wider_rows(ops: Ops, truth: Ops) -> None:
    heads = noise((5, 12, 64), torch.float32)
    q, weight = heads[:, :8], noise((64,), torch.float32, 1)
    torch.testing.assert_close(ops.rms_norm(q, weight, 1e-6), truth.rms_norm(q, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [2, 16, 64, 96, 128])
def test_rope(ops: Ops, truth: Ops, dtype: torch.dtype, interleaved: bool, size: int) -> None:
    angle = torch.rand(50, size // 2, generator=torch.Generator().manual_seed(1)) * 6
    position = torch.tensor([0, 49, 7, 7])
    x = noise((4, 5, size + 8), dtype)[:, 1:4, :size]
    out = ops.rope(x, angle.cos(), angle.sin(), position, interleaved)
    wanted = truth.rope(x, angle.cos(), angle.sin(), position, interleaved)
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 1e-2)
    with pytest.raises(IndexError, match="position_T: 50"):
        ops.rope(x, angle.cos(), angle.sin(), position + 1, interleaved)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_writes(ops: Ops, truth: Ops, dtype: torch.dtype) -> None:
    heads = noise((6, 8, 40), dtype)
    k, v = heads[:, 4:6], heads[:, 6:]
    slot = torch.tensor([3, 17, 31, 0, 5, 6])
    mine = [torch.zeros(4, 2, 8, 40, dtype=dtype) for _ in range(2)]
    theirs = [torch.zeros(4, 2, 8, 40, dtype=dtype) for _ in range(2)]
    ops.write_kv(k, v, mine[0], mine[1], slot)
    truth.write_kv(k, v, theirs[0], theirs[1], slot)
    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    latent = torch.zeros(4, 8, 40, dtype=dtype)
    ops.write_latent(heads[:, 0], latent, slot)
    assert torch.equal(latent.view(-1, 40)[slot], heads[:, 0])
    with pytest.raises(IndexError, match="kv_slot_T: 32"):
        ops.write_kv(k, v, mine[0], mine[1], slot + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_route_agrees_with_the_reference(
    ops: Ops, truth: Ops, dtype: torch.dtype, rule: RouterRule, with_bias: bool
) -> None:
    gate = noise((32, 100), dtype) / 10
    bias = noise((32,), torch.float32, 3) if with_bias else None
    for tokens in (0, 1, 9, 40):
        x = noise((tokens, 100), dtype, tokens)
        for held in (gate, gate.float()):
            expert, weight = ops.route(x, held, bias, rule)
            wanted_expert, wanted_weight = truth.route(x, held, bias, rule)
            assert torch.equal(expert, wanted_expert) and expert.dtype == torch.int32
            torch.testing.assert_close(weight, wanted_weight, atol=1e-5, rtol=1e-4)


def test_equal_scores_go_to_the_lower_expert(ops: Ops) -> None:
    expert, _ = ops.route(torch.zeros(1, 16), torch.zeros(8, 16), None, RouterRule(3, Scoring.SOFTMAX))
    assert expert.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [32, 50])
def test_mlp_agrees_with_the_reference(ops: Ops, truth: Ops, dtype: torch.dtype, inner: int) -> None:
    gate_up, down = noise((2 * inner, 64), dtype) / 8, noise((64, inner), dtype, 1) / 8
    x = noise((9, 64), dtype, 2)
    mine = ops.mlp(x, ops.pack_linear(gate_up), ops.pack_linear(down))
    wanted = truth.mlp(x.double(), truth.pack_linear(gate_up.double()), truth.pack_linear(down.double()))
    torch.testing.assert_close(
        mine.double(), wanted, atol=1e-5 if dtype == torch.float32 else 3e-2, rtol=2e-2
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(3, 40, 33), (2, 128, 64)])
def test_linear_heads(ops: Ops, dtype: torch.dtype, heads: int, outputs: int, inputs: int) -> None:
    weight = noise((heads, outputs, inputs), dtype) / 8
    packed = ops.pack_heads(weight)
    for tokens in (0, 1, 20, 130):
        x = noise((tokens, heads + 1, inputs), dtype, tokens)[:, 1:]
        wanted = torch.einsum("tai,aoi->tao", x.double(), weight.double())
        out = ops.linear_heads(x, packed)
        torch.testing.assert_close(
            out.double(), wanted, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2
        )
        if tokens:
            assert torch.equal(ops.linear_heads(x[-1:], packed), out[-1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 17, 64, 100])
def test_sums_are_added_and_rounded_once(ops: Ops, dtype: torch.dtype, size: int) -> None:
    for rows in (0, 1, 40):
        x, y = noise((rows, size), dtype), noise((rows, size), torch.float32, 1)
        wanted = (x.float() + y).to(dtype)
        ops.add_sums(x, y)
        assert torch.equal(x, wanted)
        ops.add_sums(x, x.clone())
        assert torch.equal(x, wanted + wanted)


@pytest.mark.parametrize("size", [1, 3, 16, 17, 64, 300, 4099])
def test_argmax_is_the_first_of_the_highest(ops: Ops, size: int) -> None:
    x = noise((9, size), torch.float32)
    x[1], x[2], x[3, -1] = 0, -3e38, 9
    assert ops.argmax(x).tolist() == x.argmax(-1).tolist()
    assert ops.argmax(x).tolist()[1:3] == [0, 0]
    assert ops.argmax(x[:0]).tolist() == []
    assert ops.argmax(x.t().contiguous().t()).tolist()[5:] == x.argmax(-1).tolist()[5:]
