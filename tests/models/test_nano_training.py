"""The program that trains nano: its hand-written gradients, its schedule, its windows, its repeatability."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench.nano import checkpoint, corpus, heldout, tokenizer
from bench.nano.attention import CausalAttention
from bench.nano.corpus import Document
from bench.nano.experts import RoutedExperts
from bench.nano.loss import HeadLoss
from bench.nano.optimizer import orthogonal
from bench.nano.shape import Phase, Recipe, Shape
from bench.nano.stream import Windows
from bench.nano.trainer import Trainer

TINY = Shape(
    vocab=300,
    hidden=32,
    layers=2,
    dense_inter=32,
    heads=2,
    q_rank=16,
    kv_rank=16,
    nope=8,
    value=16,
    expert_inter=16,
)
SHORT = Recipe(
    steps=6,
    tokens=64,
    rates=((-1, 0.0), (1, 1.0), (6, 0.0)),
    decay_from=3,
    phases=(Phase(0.5, 16), Phase(0.5, 32)),
)
PIECES = [np.arange(200, dtype=np.uint16), np.arange(50, 290, dtype=np.uint16)]


def normal(*size: int) -> Tensor:
    return torch.randn(size, requires_grad=True)


def same_gradients(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Equal values, and equal gradients for one random direction."""
    mine, other = ours(*inputs), theirs(*inputs)
    direction = torch.randn_like(mine)
    torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(
        torch.autograd.grad(mine, inputs, direction),
        torch.autograd.grad(other, inputs, direction),
        atol=1e-3,
        rtol=1e-3,
    )


@pytest.mark.parametrize("length", [1, 100, 256, 600])
def test_attention_gradients(length: int) -> None:
    torch.manual_seed(0)
    inputs = [normal(3, length, 8) for _ in range(3)]
    same_gradients(
        CausalAttention.apply,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0),
        *inputs,
    )


def test_expert_gradients_with_unused_experts() -> None:
    torch.manual_seed(0)
    expert_TK = torch.stack([torch.randperm(5)[:3] for _ in range(50)])

    def plain(x: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = torch.einsum("th,tkmh->tkm", x, gate_up[expert_TK]).chunk(2, -1)
        return torch.einsum("tkm,tkhm,tk->th", F.silu(gate) * up, down[expert_TK], weight)

    same_gradients(
        lambda x, weight, gate_up, down: RoutedExperts.apply(x, expert_TK, weight, gate_up, down),
        plain,
        normal(50, 16),
        normal(50, 3),
        normal(8, 24, 16),
        normal(8, 16, 12),
    )


def test_loss_gradients_over_several_chunks() -> None:
    torch.manual_seed(0)
    target = torch.randint(0, 40, (1500,))
    same_gradients(
        lambda x, head: HeadLoss.apply(x, head, target),
        lambda x, head: F.cross_entropy(x @ head.t(), target),
        normal(1500, 16),
        normal(40, 16),
    )


@pytest.mark.parametrize("size", [(3, 24, 16), (3, 16, 24)])
def test_muon_makes_singular_values_near_one(size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(size)).float())
    assert values.min() > 0.5 and values.max() < 1.4


def test_schedule_runs_through_its_knots_and_squeezes_with_the_steps() -> None:
    recipe = replace(Recipe(), steps=100, rates=((-1, 0.0), (9, 1.0), (40, 1.0), (100, 0.0)))
    rates = [recipe.rate(step) for step in range(101)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[40] == 1.0 and rates[70] == 0.5 and rates[100] == 0.0
    assert replace(recipe, steps=50).rate(35) == recipe.rate(70)


def test_lengths_follow_the_phases() -> None:
    assert [SHORT.length(step) for step in range(7)] == [16, 16, 16, 32, 32, 32, 32]


@given(st.integers(0, 200), st.integers(1, 8), st.integers(0, 8))
def test_every_held_out_token_counts_once(count: int, stride: int, extra: int) -> None:
    ids = list(range(10, 10 + count))
    scored = [w.ids[1 + w.first :] for w in heldout.windows(ids, stride + extra, stride)]
    assert [token for part in scored for token in part] == ids


def test_windows_repeat_for_a_seed_and_differ_between_epochs() -> None:
    first, again = iter(Windows(PIECES, 16, 2, seed=7)), iter(Windows(PIECES, 16, 2, seed=7))
    pairs = [(next(first), next(again)) for _ in range(30)]
    assert all(torch.equal(a, b) and a.shape == (2, 18) for a, b in pairs)
    assert not torch.equal(pairs[0][0], pairs[13][0])


def test_training_repeats_and_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    whole = Trainer(TINY, SHORT, PIECES)
    curve = list(whole.run())
    broken = Trainer(TINY, SHORT, PIECES)
    run = broken.run()
    for _ in range(4):
        next(run)
    broken.save(tmp_path / "state")
    resumed = Trainer(TINY, SHORT, PIECES)
    resumed.resume(tmp_path / "state")
    list(resumed.run())
    assert resumed.curve == curve and len(curve) == 6
    for (name, ours), (_, other) in zip(
        checkpoint.views(whole.model), checkpoint.views(resumed.model), strict=True
    ):
        assert torch.equal(ours, other), name


def test_a_shape_reads_back_from_its_config() -> None:
    assert Shape.read(TINY.architecture()) == TINY


def test_a_saved_model_loads_to_its_rounded_values(tmp_path: Path) -> None:
    model = Trainer(TINY, SHORT, PIECES).model
    checkpoint.save(model, tmp_path)
    loaded = dict(checkpoint.views(checkpoint.load(tmp_path)))
    for name, value in checkpoint.views(model):
        kept = value.float() if name.endswith("bias") else value.bfloat16().float()
        assert torch.equal(loaded[name], kept), name


def test_the_bias_moves_only_outside_the_band() -> None:
    trainer = Trainer(TINY, SHORT, PIECES)
    moe = trainer.model.moes()[0]
    moe.load[:] = 10.0
    moe.load[0], moe.load[1] = 1.0, 90.0
    trainer.model.moes()[1].load[:] = 1.0
    trainer._steer(0.5)
    assert moe.bias[0] == 0.5 and moe.bias[1] == -0.5 and not moe.bias[2:].any() and not moe.load.any()


def test_corpus_split_and_dialogues(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_bytes(b"\xff\xfe")
    (tmp_path / "heap.py").write_text(
        'def push(heap, item=None):\n    """Push item onto the heap."""\n    return heap\n'
    )
    docs = corpus.documents(tmp_path)
    assert [doc.path for doc in docs] == ["heap.py"]
    asked = {turn.user: turn.assistant for turn in corpus.turns(docs[0])}
    assert asked["What does heap.push do?"] == "Push item onto the heap."
    assert asked["Write the signature of heap.push."] == "def push(heap, item=None)"
    assert asked["Write a Python function push: Push item onto the heap."].startswith("```python\ndef push(")
    held = sum(Document(f"m{i}.py", "x").held_out for i in range(4000))
    assert 140 < held < 260


def test_tokenizer_has_the_asked_size_and_keeps_indentation_in_one_token() -> None:
    bpe = tokenizer.build([Path(corpus.__file__).read_text()], 400)
    assert bpe.get_vocab_size() == 400
    assert len(bpe.encode("\n        ", add_special_tokens=False).ids) == 1
    assert bpe.encode("x").ids[0] == 1
