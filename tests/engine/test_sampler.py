"""Sampling against float64 formulas, and its independence of everything but the row itself."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.engine.request import GenerationRequest, SamplingParams
from afserve.engine.sampler import logprobs_of
from afserve.engine.sampler import sample as sample_with
from afserve.engine.sequence import Sequence
from afserve.errors import RequestError
from afserve.kernels.ops import open_ops

V = 12
OPS = open_ops("cpu", 1)


def sample(rows, sequences):
    return sample_with(rows, sequences, OPS)


def sequence(output=(), prompt=(1, 2), name="r", eos=(0,), **params):
    request = GenerationRequest(name, tuple(prompt), SamplingParams(**{"max_tokens": 1000, **params}))
    made = Sequence.start(request, 0, frozenset(eos))
    made.tokens += output
    return made


def logits(seed=0):
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 2


def draws(row, count=4000, **params):
    """Tokens at `count` positions of one seeded request, all from the same logits."""
    out = []
    for position in range(count):
        out += sample(
            row[None], [sequence([5] * position if position < 50 else [5] * 50, seed=position, **params)]
        )
    return Counter(out)


def test_greedy_is_argmax():
    rows = torch.stack([logits(i) for i in range(5)])
    assert sample(rows, [sequence(temperature=0.0)] * 5) == rows.argmax(-1).tolist()


def test_frequencies_follow_the_softmax():
    row = logits(3)
    got = draws(row, temperature=1.3)
    want = (row.double() / 1.3).softmax(-1)
    for token in range(V):
        sigma = math.sqrt(float(want[token] * (1 - want[token])) * 4000)
        assert abs(got[token] - 4000 * float(want[token])) < 5 * sigma + 1


@pytest.mark.parametrize("k", [1, 3, 0, -1, 100])
def test_top_k(k):
    row = logits(4)
    allowed = set(row.topk(k).indices.tolist()) if 0 < k < V else set(range(V))
    assert set(draws(row, 600, top_k=k)) <= allowed


def test_top_p_keeps_the_smallest_sufficient_set():
    row = torch.tensor([0.5, 0.3, 0.15, 0.05] + [0.0] * 8).log()
    assert set(draws(row, 500, top_p=0.79)) == {0, 1}
    assert set(draws(row, 500, top_p=0.81)) == {0, 1, 2}
    assert set(draws(row, 300, top_p=0.01)) == {0}


def test_min_p_is_relative_to_the_best():
    row = torch.tensor([0.5, 0.3, 0.15, 0.05] + [0.0] * 8).log()
    assert set(draws(row, 500, min_p=0.4)) == {0, 1}
    assert set(draws(row, 300, min_p=1.0)) == {0}


def test_a_seed_repeats_and_ignores_its_neighbours():
    rows = torch.stack([logits(i) for i in range(4)])
    one = sequence([3, 4], seed=11)
    alone = sample(rows[2:3], [one])
    others = [sequence(temperature=0.0), sequence(seed=5), one, sequence([1], repetition_penalty=2.0)]
    assert sample(rows, others)[2] == alone[0]
    different = {sample(rows[2:3], [sequence([3, 4], seed=s)])[0] for s in range(40)}
    assert len(different) > 3


def test_penalties():
    row = torch.tensor([1.0, -1.0, 2.0, 0.5] + [-9.0] * 8)
    seen = sequence([2, 2, 3], prompt=(1,), temperature=0.0, repetition_penalty=4.0)
    assert sample(row[None].clone(), [seen]) == [0]  # 2 -> 0.5, 3 -> 0.125, 0 was never seen
    frequent = sequence([2, 2], prompt=(0,), temperature=0.0, frequency_penalty=0.6)
    assert sample(row[None], [frequent]) == [0]  # 2.0 - 1.2 < 1.0
    present = sequence([2, 2], prompt=(0,), temperature=0.0, presence_penalty=0.6)
    assert sample(row[None], [present]) == [2]  # 2.0 - 0.6 > 1.0
    assert row.tolist()[:4] == [1.0, -1.0, 2.0, 0.5], "logits were changed in place"


def test_logit_bias_and_min_tokens():
    row = torch.full((V,), 0.0)
    row[0] = 5.0
    assert sample(row[None], [sequence(temperature=0.0, logit_bias=((4, 9.0),))]) == [4]
    held = sequence([3], temperature=0.0, min_tokens=2, stop_token_ids=(1,))
    assert sample(row[None], [held])[0] not in (0, 1)
    assert sample(row[None], [sequence([3, 3], temperature=0.0, min_tokens=2)]) == [0]


@given(st.integers(0, V - 1), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_logprobs(token, count):
    row = logits(9)
    entry = logprobs_of(row, token, count)
    truth = row.double().log_softmax(-1)
    assert math.isclose(entry.logprob, float(truth[token]), abs_tol=1e-5)
    assert entry.rank == 1 + int((row > row[token]).sum())
    assert [t for t, _ in entry.top] == row.topk(min(count, V)).indices.tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", math.nan), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("min_p", 2),
     ("repetition_penalty", 0.0), ("presence_penalty", 3), ("max_tokens", 0), ("min_tokens", 2000), ("n", 0),
     ("logprobs", 21), ("stop", ("",)), ("seed", 1 << 70)],
)  # fmt: skip
def test_bad_parameters_are_named(field, value):
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{"max_tokens": 1000, field: value})
    assert caught.value.param == field
