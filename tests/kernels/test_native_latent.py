"""The fused attention half of an MLA layer against the single ops it is made of."""

from dataclasses import replace

import pytest
import torch

from afserve.kernels.grouped import Groups
from afserve.kernels.latent import MlaLayer, PreparedMla
from afserve.kernels.ops import Ops
from afserve.kernels.routing import RouterRule, Scoring
from tests.kernels.test_native_layer import decode_batch

pytestmark = pytest.mark.by_day(2)

HEADS, NOPE, ROPE, VALUE, RANK, OWN, HIDDEN, EXPERTS = 4, 24, 16, 20, 48, 40, 96, 8
KEPT = [(False, None), (True, None), (False, Groups(32))]
DTYPES = [torch.float32, torch.bfloat16]


def layer(
    ops: Ops, dtype: torch.dtype, ranked: bool, router: bool, int8: bool = False, int4: Groups | None = None
) -> PreparedMla:
    g = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=g) / shape[-1] ** 0.5).to(dtype)

    angle, width = torch.rand(64, ROPE // 2, generator=g) * 6, HEADS * (NOPE + ROPE)
    rows = (OWN if ranked else width) + RANK + ROPE
    return ops.prepare_mla(
        MlaLayer(
            input_norm_H=1 + noise(HIDDEN),
            down=ops.pack_linear(noise(rows, HIDDEN), noise(rows), int8, int4),
            q_norm_R=1 + noise(OWN) if ranked else None,
            q_up=ops.pack_linear(noise(width, OWN), None, int8, int4) if ranked else None,
            latent_norm_C=1 + noise(RANK),
            up_k=ops.pack_heads(noise(HEADS, RANK, NOPE), int8, int4),
            up_v=ops.pack_heads(noise(HEADS, VALUE, RANK), int8, int4),
            cos_PD=angle.cos(),
            sin_PD=angle.sin(),
            interleaved=ranked,
            out=ops.pack_linear(noise(HIDDEN, HEADS * VALUE), None, int8, int4),
            post_norm_H=1 + noise(HIDDEN),
            gate_EH=noise(EXPERTS, HIDDEN).float() if router else None,
            bias_E=torch.rand(EXPERTS, generator=g) if router else None,
            gate_bias_E=None,
            rule=RouterRule(2, Scoring.SIGMOID, renormalise=True) if router else None,
            heads=HEADS,
            nope=NOPE,
            rope=ROPE,
            eps=1e-6,
            latent_eps=1e-5,
            scale=(NOPE + ROPE) ** -0.5,
        )
    )


def cache(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4 * n, 16, RANK + ROPE, generator=torch.Generator().manual_seed(6)).to(dtype)


def rows(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranked", "router"), [(True, True), (False, False)])
@pytest.mark.parametrize("contexts", [[1], [5, 64, 17], list(range(1, 41))])
def test_the_fused_half_is_its_parts(
    pair: tuple[Ops, Ops], truth: Ops, dtype: torch.dtype, ranked: bool, router: bool, contexts: list[int]
) -> None:
    batch, results = decode_batch(contexts), []
    for ops in (*pair, truth):
        made = layer(ops, dtype, ranked, router)
        assert (made.handle is None) == (ops is truth)
        kept, stream = cache(len(contexts), dtype), rows(len(contexts), dtype)
        half = ops.mla_half(stream, ops.bind_mla(made, kept), batch)
        results.append((stream, half.normed_TH, kept, half.expert_TK, half.weight_TK))
    alone, threaded, wanted = results
    for mine, same, right in zip(alone, threaded, wanted):
        assert (mine is None) == (right is None)
        if mine is not None and same is not None:
            assert torch.equal(mine, same)
            if dtype == torch.float32:
                torch.testing.assert_close(mine, right, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(alone[0], wanted[0], atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize(("int8", "int4"), KEPT)
def test_the_fused_half_has_the_bits_of_the_single_ops(
    ops: Ops, dtype: torch.dtype, ranked: bool, int8: bool, int4: Groups | None
) -> None:
    contexts = [3, 40, 64]
    batch, made = decode_batch(contexts), layer(ops, dtype, ranked, True, int8, int4)
    results = []
    for handle in (made.handle, None):
        kept, stream = cache(3, dtype), rows(3, dtype)
        half = ops.mla_half(stream, ops.bind_mla(replace(made, handle=handle), kept), batch)
        results.append((stream, half.normed_TH, kept, half.expert_TK))
    for fused, single in zip(*results):
        assert fused is not None and single is not None and torch.equal(fused, single)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("int8", "int4"), KEPT)
def test_a_sequence_does_not_depend_on_the_batch(
    ops: Ops, dtype: torch.dtype, int8: bool, int4: Groups | None
) -> None:
    contexts = list(range(20, 29))
    made, kept = layer(ops, dtype, True, True, int8, int4), cache(9, dtype)
    stream = rows(9, dtype)
    whole = ops.mla_half(stream, ops.bind_mla(made, kept), decode_batch(contexts))
    for count in (1, 2, 5):
        again, part = cache(9, dtype), rows(9, dtype)[:count].clone()
        half = ops.mla_half(part, ops.bind_mla(made, again), decode_batch(contexts[:count]))
        assert torch.equal(part, stream[:count]) and torch.equal(half.normed_TH, whole.normed_TH[:count])


def test_what_does_not_fit_is_named(ops: Ops) -> None:
    made = layer(ops, torch.float32, True, True)
    for name, other in (
        ("post_norm_H", {"post_norm_H": made.layer.post_norm_H[:-1]}),
        ("q_up: a query", {"q_norm_R": None}),
        ("up_k: ", {"up_k": made.layer.up_v}),
        ("down: ", {"down": made.layer.out}),
        ("q_up: ", {"rope": ROPE - 2}),
        ("cos_PD", {"cos_PD": made.layer.cos_PD[:, :-1]}),
        ("gate_EH", {"rule": None}),
        ("bias_E", {"bias_E": torch.zeros(EXPERTS + 1)}),
    ):
        with pytest.raises(ValueError, match=name):
            ops.prepare_mla(replace(made.layer, **other))
    with pytest.raises(ValueError, match="cache_NBC"):
        ops.bind_mla(made, cache(1, torch.float32)[..., 1:])
    with pytest.raises(ValueError, match="x_TH"):
        bound = ops.bind_mla(made, cache(1, torch.float32))
        ops.mla_half(torch.zeros(1, HIDDEN + 1), bound, decode_batch([1]))


def test_a_layer_that_the_library_cannot_run_says_why(falling: Ops) -> None:
    made = layer(falling, torch.bfloat16, True, True)
    strange = replace(
        made.layer, gate_EH=torch.full((EXPERTS, HIDDEN), 0.1), gate_bias_E=torch.zeros(EXPERTS)
    )
    assert made.handle is not None and falling.prepare_mla(strange).handle is None
    assert [(f.op, f.reason) for f in falling.fallbacks()] == [
        ("mla_half", "a gate with a bias that torch.bfloat16 can't hold")
    ]
