"""The fused attention half against the single ops it is made of."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from afserve.kernels.layer import GqaLayer, PreparedGqa, Steps
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.kernels.routing import RouterRule, Scoring

pytestmark = pytest.mark.by_day(2)

HEADS, GROUPS, SIZE, HIDDEN, EXPERTS = 4, 2, 32, 96, 8


def decode_batch(contexts: list[int]) -> PagedBatch:
    """One new token each; sequence s owns blocks 4 s .. 4 s + 3 of 16."""
    n = len(contexts)
    position = torch.tensor(contexts) - 1
    table = torch.arange(4 * n, dtype=torch.int32).view(n, 4)
    slot = table[torch.arange(n), position // 16].long() * 16 + position % 16
    context = torch.tensor(contexts, dtype=torch.int32)
    return PagedBatch(
        position, slot, torch.arange(n + 1, dtype=torch.int32), context, table, 1, max(contexts)
    )


def layer(
    ops: Ops,
    dtype: torch.dtype,
    norms: bool,
    router: bool,
    sink_A: torch.Tensor | None = None,
    kind: str = "",
) -> PreparedGqa:
    """kind: norms of q and k are "wide", of all heads together, or "late", after the rotary embedding; or there are
    "steps" that few families have, by "heads" or "centred" another choice of them."""
    g = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=g) / shape[-1] ** 0.5).to(dtype)

    angle = torch.rand(64, SIZE // 2, generator=g) * 6
    return ops.prepare_gqa(
        GqaLayer(
            input_norm_H=1 + noise(HIDDEN),
            qkv=ops.pack_linear(
                noise((HEADS + 2 * GROUPS) * SIZE, HIDDEN), noise((HEADS + 2 * GROUPS) * SIZE)
            ),
            q_norm_D=1 + noise(SIZE * (HEADS if kind == "wide" else 1)) if norms else None,
            k_norm_D=1 + noise(SIZE * (GROUPS if kind == "wide" else 1)) if norms else None,
            cos_PD=angle.cos(),
            sin_PD=angle.sin(),
            out=ops.pack_linear(noise(HIDDEN, HEADS * SIZE)),
            post_norm_H=1 + noise(HIDDEN),
            gate_EH=noise(EXPERTS, HIDDEN).float() if router else None,
            bias_E=torch.rand(EXPERTS, generator=g) if router else None,
            rule=RouterRule(2, Scoring.SIGMOID, renormalise=True) if router else None,
            heads=HEADS,
            groups=GROUPS,
            head_dim=SIZE,
            eps=1e-6,
            scale=SIZE**-0.5,
            sink_A=sink_A,
            steps=steps_of(ops, kind, noise),
        )
    )


def steps_of(ops: Ops, kind: str, noise: Callable[..., torch.Tensor]) -> Steps:
    scale_E = 1 + noise(EXPERTS).float()
    if kind == "steps":
        opening = ops.pack_linear(noise(HEADS * SIZE, HIDDEN))
        norms = {
            "after_norm_H": 1 + noise(HIDDEN),
            "v_norm_D": 1 + noise(SIZE),
            "router_norm_H": 1 + noise(HIDDEN),
        }
        return Steps(gate=opening, expert_scale_E=scale_E, q_scale_P=torch.linspace(0.5, 2, 64), **norms)
    if kind == "heads":
        return Steps(gate=ops.pack_linear(noise(HEADS, HIDDEN)), softplus=True, parallel=True, clip=0.7)
    if kind == "centred":
        return Steps(centred=True, input_bias_H=noise(HIDDEN), post_bias_H=noise(HIDDEN))
    return Steps(late=kind == "late")


def caches(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(6)
    return [torch.randn(4 * n, GROUPS, 16, SIZE, generator=g).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("norms", "router", "kind"),
    [
        (True, True, ""),
        (False, False, ""),
        (True, True, "steps"),
        (False, True, "heads"),
        (True, True, "centred"),
    ],
)
@pytest.mark.parametrize("contexts", [[1], [5, 64, 17], list(range(1, 41))])
def test_the_fused_half_is_its_parts(
    pair: tuple[Ops, Ops],
    truth: Ops,
    dtype: torch.dtype,
    norms: bool,
    router: bool,
    kind: str,
    contexts: list[int],
) -> None:
    batch = decode_batch(contexts)
    x = torch.randn(len(contexts), HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype)
    results = []
    for ops in (*pair, truth):
        made = layer(ops, dtype, norms, router, kind=kind)
        assert (made.handle is None) == (ops is truth)
        k, v = caches(len(contexts), dtype)
        stream = x.clone()
        half = ops.gqa_half(stream, ops.bind_gqa(made, k, v), batch)
        results.append((stream, half.normed_TH, k, v, half.expert_TK, half.weight_TK))
    alone, threaded, wanted = results
    for mine, same, right in zip(alone, threaded, wanted):
        assert (mine is None) == (right is None)
        if mine is not None and same is not None:
            assert torch.equal(mine, same)
            if dtype == torch.float32:
                torch.testing.assert_close(mine, right, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(alone[0], wanted[0], atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sink", [None, torch.linspace(-1, 2, HEADS)])
@pytest.mark.parametrize("kind", ["", "wide", "late", "steps", "heads", "centred"])
def test_the_fused_half_has_the_bits_of_the_single_ops(
    ops: Ops, dtype: torch.dtype, sink: torch.Tensor | None, kind: str
) -> None:
    contexts = [3, 40, 64]
    batch, made = decode_batch(contexts), layer(ops, dtype, True, True, sink, kind)
    assert made.handle is not None
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype)
    results = []
    for handle in (made.handle, None):
        k, v = caches(3, dtype)
        stream = x.clone()
        half = ops.gqa_half(stream, ops.bind_gqa(replace(made, handle=handle), k, v), batch)
        results.append((stream, half.normed_TH, k, v, half.expert_TK))
    for fused, single in zip(*results):
        assert fused is not None and single is not None and torch.equal(fused, single)


def test_sinks_change_what_the_fused_half_makes(ops: Ops, truth: Ops) -> None:
    batch, sink = decode_batch([3, 40, 64]), torch.linspace(-1, 2, HEADS)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(7))
    made = []
    for each, sink_A in ((ops, sink), (truth, sink), (ops, None)):
        stream = x.clone()
        prepared = layer(each, torch.float32, True, True, sink_A)
        each.gqa_half(stream, each.bind_gqa(prepared, *caches(3, torch.float32)), batch)
        made.append(stream)
    torch.testing.assert_close(made[0], made[1], atol=2e-5, rtol=1e-4)
    assert not torch.allclose(made[0], made[2], atol=1e-3)


def test_a_layer_that_does_not_fit_is_named(ops: Ops) -> None:
    made = layer(ops, torch.float32, True, True)
    with pytest.raises(ValueError, match="post_norm_H"):
        ops.prepare_gqa(replace(made.layer, post_norm_H=made.layer.post_norm_H[:-1]))
    with pytest.raises(ValueError, match=r"sink_A: shape \(2,\), expected \(4,\)"):
        layer(ops, torch.float32, True, True, torch.zeros(2))
    bound = ops.bind_gqa(made, *caches(1, torch.float32))
    with pytest.raises(ValueError, match="x_TH"):
        ops.gqa_half(torch.zeros(1, HIDDEN + 1), bound, decode_batch([1]))
    k, v = caches(1, torch.float32)
    for name, pair in (("k_NGBD", (k[..., 1:], v)), ("v_NGBD", (k, v[:, :1])), ("v_NGBD", (k, v[1:]))):
        with pytest.raises(ValueError, match=rf"{name}: shape .*, expected \(4, 2, 16, 32\)"):
            ops.bind_gqa(made, *pair)


def test_one_layer_over_two_caches_in_turn(ops: Ops) -> None:
    """What is bound to one cache knows nothing of the other, and a bound batch serves both."""
    contexts = [3, 40, 64]
    batch, made = ops.bind_batch(decode_batch(contexts)), layer(ops, torch.bfloat16, True, True)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(7)).bfloat16()
    pairs = [caches(3, torch.bfloat16), [c * 2 for c in caches(3, torch.bfloat16)]]
    bound = [ops.bind_gqa(made, *pair) for pair in pairs]
    again = [ops.gqa_half(x.clone(), each, batch).normed_TH for each in (*bound, *bound[::-1])]
    assert torch.equal(again[0], again[3]) and torch.equal(again[1], again[2])
    assert not torch.equal(again[0], again[1])
    with pytest.raises(FrozenInstanceError):
        bound[0].handle = None  # type: ignore[misc]


def test_another_batch_made_of_a_bound_one_is_looked_up_anew(ops: Ops) -> None:
    batch, made = ops.bind_batch(decode_batch([3, 40, 64])), layer(ops, torch.float32, True, True)
    bound = ops.bind_gqa(made, *caches(3, torch.float32))
    one = replace(
        batch,
        position_T=batch.position_T[:1],
        kv_slot_T=batch.kv_slot_T[:1],
        query_start_S1=batch.query_start_S1[:2],
        context_S=batch.context_S[:1],
        block_table_SB=batch.block_table_SB[:1],
    )
    assert batch.handle is not None and one.handle is None
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(7))
    whole = ops.gqa_half(x.clone(), bound, batch).normed_TH
    assert torch.equal(ops.gqa_half(x[:1].clone(), bound, one).normed_TH, whole[:1])
