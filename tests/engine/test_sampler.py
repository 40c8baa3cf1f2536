"""Sampling against float64 formulas, and its independence of everything but the row itself."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.engine.logprobs import logprobs_of
from afserve.engine.sampler import Failure, Sampler
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.step.host_reader import read_at_once
from afserve.engine.step.step_buffers import StepBuffers
from afserve.errors import RequestError
from afserve.kernels.devices.opened import device_of
from afserve.kernels.ops import open_ops

V = 12
OPS = open_ops("cpu", 1)
HERE = device_of(torch.device("cpu"))


def sample(rows, sequences):
    return Sampler(OPS, StepBuffers(HERE, 1)).sample(rows, sequences)


def told(rows, tokens, counts):
    return read_at_once(logprobs_of(rows, range(len(tokens)), tokens, counts, StepBuffers(HERE, 8)))


def sequence(output=(), prompt=(1, 2), eos=(0,), **params):
    params = {"max_tokens": 1000, "seed": 1, **params}
    request = GenerationRequest(1, tuple(prompt), SamplingParams(**params))
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


@pytest.mark.slow
def test_frequencies_follow_the_softmax():
    row = logits(3)
    got = draws(row, temperature=1.3)
    want = (row.double() / 1.3).softmax(-1)
    for token in range(V):
        sigma = math.sqrt(float(want[token] * (1 - want[token])) * 4000)
        assert abs(got[token] - 4000 * float(want[token])) < 5 * sigma + 1


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3, 0, -1, 100])
def test_top_k(k):
    row = logits(4)
    allowed = set(row.topk(k).indices.tolist()) if 0 < k < V else set(range(V))
    assert set(draws(row, 600, top_k=k)) <= allowed


@pytest.mark.slow
def test_top_p_keeps_the_smallest_sufficient_set():
    row = torch.tensor([0.5, 0.3, 0.15, 0.05] + [1e-30] * 8).log()
    assert set(draws(row, 500, top_p=0.79)) == {0, 1}
    assert set(draws(row, 500, top_p=0.81)) == {0, 1, 2}
    assert set(draws(row, 300, top_p=0.01)) == {0}


@pytest.mark.slow
def test_min_p_is_relative_to_the_best():
    row = torch.tensor([0.5, 0.3, 0.15, 0.05] + [1e-30] * 8).log()
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
    (entry,) = told(row[None], [token], [count])
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


EXTREMES = [
    0.0, -0.0, 5e-324, -5e-324, 1e-320, 1e-46, 1e-45, 1e-40, 1e-38, 1e-5, 0.01, 1.0, 2.0, 100.0, 1e30, 1e38,
    3.5e38, 1e300, 1.7976931348623157e308, -1e308, math.inf, -math.inf, math.nan, 1, 0, -1, 2**31, 2**63, -(2**63),
    10**400, True, None,
]  # fmt: skip
FIELDS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "min_tokens", "logprobs", "prompt_logprobs", "n",
)  # fmt: skip
NUMBERS = st.one_of(st.sampled_from(EXTREMES), st.floats(), st.integers())
ROWS = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, 3.4e38, -3.4e38, 1e-45]),
    min_size=V, max_size=V,
)  # fmt: skip


def drawn_fields(data):
    chosen = data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4, unique=True))
    return {name: data.draw(NUMBERS, label=name) for name in chosen}


def every_number_is_served_or_refused(data):
    fields = drawn_fields(data)
    if fields.get("seed", 0) is None:
        fields["seed"] = 7  # the scheduler gives one to whoever has none
    row = torch.tensor(data.draw(ROWS))
    try:
        one = sequence([2, 5], **fields)
    except RequestError as error:
        assert error.param in (*fields, "min_tokens"), "min_tokens is checked against max_tokens"
        assert error.param is not None
        assert error.param in error.message and len(error.message) < 300
        return
    beside = sequence(temperature=0.0)
    chosen = sample(torch.stack([row, row, row]), [beside, one, beside])
    assert chosen[0] == chosen[2] == int(row.argmax())
    assert isinstance(chosen[1], int) and 0 <= chosen[1] < V, "one candidate is always left"
    (entry,) = told(row[None], [chosen[1]], [5])
    assert all(math.isfinite(value) for value in (entry.logprob, *(v for _, v in entry.top)))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_numbers_from_their_extremes(data):
    every_number_is_served_or_refused(data)


@pytest.mark.long
@given(st.data())
@settings(max_examples=20_000, deadline=None)
def test_numbers_from_their_extremes_at_length(data):
    every_number_is_served_or_refused(data)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": t} for t in (1e-40, 1e-38, 1e-320, 9e-6)]
    + [{"temperature": 1.0, "top_p": p} for p in (1e-46, 5e-324)]
    + [{"temperature": 1.0, "top_k": 1}, {"temperature": 1e-5, "min_p": 1.0}],
)
def test_what_leaves_one_candidate_is_greedy(fields):
    row = logits(5)
    assert sample(row[None], [sequence(**fields)]) == [int(row.argmax())]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad):
    rows = torch.stack([logits(i) for i in range(3)])
    rows[1, 7] = bad
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 2.0}):
        got = sample(rows, [sequence(**params)] * 3)
        assert isinstance(got[1], Failure) and "not finite" in got[1].message
        assert got[::2] == sample(rows[::2], [sequence(**params)] * 2)


def test_a_bug_in_one_draw_fails_that_sequence_only(monkeypatch):
    def broken(sequence, vocabulary):
        raise IndexError("no candidate left")

    monkeypatch.setattr("afserve.engine.sampler.edits_of", broken)
    rows = torch.stack([logits(i) for i in range(2)])
    got = sample(rows, [sequence(temperature=1.0), sequence(temperature=0.0)])
    assert isinstance(got[0], Failure) and "IndexError" in got[0].message
    assert got[1] == int(rows[1].argmax())


def test_a_vocabulary_of_stop_tokens_cannot_be_held_back():
    held = sequence([3], min_tokens=5, stop_token_ids=tuple(range(V)))
    (got,) = sample(logits()[None], [held])
    assert isinstance(got, Failure) and "min_tokens" in got.message


def test_a_token_outside_the_vocabulary_changes_no_other_row():
    rows = torch.stack([logits(i) for i in range(2)])
    got = sample(rows, [sequence(logit_bias=((V, 100.0),)), sequence(logit_bias=((0, 0.0),))])
    assert isinstance(got[0], Failure) and "IndexError" in got[0].message
    assert got[1] == sample(rows[1:], [sequence()])[0]


def test_alternatives_do_not_depend_on_what_others_ask_for():
    rows = torch.stack([logits(1).round(), logits(2).round()])
    both = told(rows, [3, 4], [2, 20])
    assert [both[0]] == told(rows[:1], [3], [2]) and len(both[0].top) == 2 and len(both[1].top) == V
    assert told(rows, [], []) == []


def test_log_probabilities_of_a_step_are_one_read():
    rows = torch.stack([logits(i) for i in range(200)])
    reads = logprobs_of(rows, [7, 7, *range(150)], [2] * 152, [3] * 152, StepBuffers(HERE, 8))
    numbers = next(reads).tolist()
    with pytest.raises(StopIteration) as ended:
        reads.send(numbers)
    assert len(ended.value.value) == 152 and [ended.value.value[0]] == told(rows[7:8], [2], [3])


@pytest.mark.slow
def test_the_nucleus_is_the_one_of_the_whole_vocabulary(monkeypatch):
    """Few tokens are looked at first; where they do not hold enough probability, all are."""
    row = torch.randn(500, generator=torch.Generator().manual_seed(1)) * 0.1
    wanted = [sample_one(row, s) for s in range(200)]
    monkeypatch.setattr("afserve.engine.sampler.NUCLEUS", 16)
    assert [sample_one(row, s) for s in range(200)] == wanted


def sample_one(row, seed):
    return sample(row[None], [sequence(seed=seed, top_p=0.7, min_p=1e-4)])[0]


@pytest.mark.parametrize("at", [0, 1])
def test_a_seed_and_its_negative_draw_differently(at):
    """At one position, from 16 rows."""
    rows = torch.randn(16, 4000, generator=torch.Generator().manual_seed(2)) * 0.1
    for seed in (1, 2, 300, 1 << 32, (1 << 62) + 5, (1 << 63) - 1):
        one, other = (sample(rows, [sequence([5] * at, seed=each)] * 16) for each in (seed, -seed))
        assert one != other


def test_choices_count_seeds_up_and_wrap_in_64_bits():
    params = SamplingParams(n=3, seed=(1 << 63) - 2, max_tokens=5)
    assert [one.seed for one in params.choices()] == [(1 << 63) - 2, (1 << 63) - 1, -1 << 63]
    assert all(one.n == 1 and one.max_tokens == 5 for one in params.choices())
    assert SamplingParams(seed=7).choices() == (SamplingParams(seed=7),)
    drawn = [one.seed for one in SamplingParams(n=40).choices() if one.seed is not None]
    assert len(set(drawn)) == len(drawn) == 40 and all(0 <= seed < 1 << 63 for seed in drawn)
