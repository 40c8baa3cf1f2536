"""Draws of whole batches: against a row-by-row reference, transformers' warpers, and the chances of each token."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from afserve.engine import sampler as sampling
from afserve.engine.draws import NARROW, NONE_LEFT, draw_ranked, draw_tokens, drawn_number, forbidden_of
from afserve.engine.scheduling.request import SamplingParams
from afserve.engine.scheduling.sequence import Sequence
from tests.engine.row_by_row import edited, kept, token_of
from tests.engine.test_sampler import sample, sequence

SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.6, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
]


def row_of(vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def drawn(row_V: torch.Tensor, numbers: list[float], params: SamplingParams, heaviest: int) -> list[int]:
    one = torch.tensor([params.temperature, max(0, params.top_k), params.top_p, params.min_p]).double()
    number_1D = torch.tensor([numbers], dtype=torch.float64)
    settings_5D1 = torch.cat([one[:, None].expand(-1, len(numbers)), number_1D]).unsqueeze(-1)
    logits_DV = row_V.double().expand(len(numbers), -1).clone()
    if params.top_k > 0 and heaviest < len(row_V):
        return draw_ranked(logits_DV, settings_5D1, params.top_k, params.top_p < 1, params.min_p > 0).tolist()
    return draw_tokens(logits_DV, settings_5D1, heaviest, params.min_p > 0).tolist()


def warped(row_V: torch.Tensor, params: SamplingParams, seen: list[int]) -> torch.Tensor:
    """The chances that transformers gives its tokens."""
    steps = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        steps.append(MinPLogitsWarper(params.min_p))
    scores = steps(torch.tensor([seen], dtype=torch.int64), row_V[None].double().clone())
    return torch.as_tensor(scores)[0].softmax(-1)


@pytest.mark.parametrize("fields", SETTINGS)
@pytest.mark.parametrize("wide", [False, True])
def test_numbers_fall_on_tokens_as_often_as_transformers_gives_them_a_chance(fields, wide):
    """10,000 numbers at equal distances: each token has its share, but for one number at either end."""
    row, params, count = row_of(97), SamplingParams(seed=1, **fields), 10_000
    heaviest = 97 if wide else 60
    heaviest = heaviest if "top_k" in fields or "top_p" in fields else 0
    found = Counter(drawn(row, [(at + 0.5) / count for at in range(count)], params, heaviest))
    for token, chance in enumerate(warped(row, params, []).tolist()):
        assert abs(found[token] - count * chance) <= 1, token


@pytest.mark.parametrize("fields", SETTINGS)
def test_the_row_by_row_reference_is_that_of_transformers(fields):
    for seed in range(20):
        row = row_of(50, seed)
        one = sequence([5, 5, 9], prompt=(1, 2), repetition_penalty=1.3, **fields)
        wanted = warped(row, one.request.params, one.tokens)
        weights = torch.tensor(kept(edited(row.tolist(), one), one.request.params))
        assert torch.allclose(weights / weights.sum(), wanted.float(), atol=1e-6)


def rows_and_sequences(count: int, vocabulary: int) -> tuple[torch.Tensor, list[Sequence]]:
    """Rows of all kinds, drawn with a seed: also ties, as bf16 logits have them."""
    draw = random.Random(4)
    rows = torch.randn((count, vocabulary), generator=torch.Generator().manual_seed(2)) * 3
    rows[::3] = rows[::3].bfloat16().float()
    sequences = []
    for number in range(count):
        fields = {
            "temperature": draw.choice([0.0, 0.3, 1.0, 2.5]),
            "top_k": draw.choice([0, 0, 1, 7, 30]),
            "top_p": draw.choice([1.0, 1.0, 0.6, 0.95]),
            "min_p": draw.choice([0.0, 0.0, 0.2]),
            "repetition_penalty": draw.choice([1.0, 1.0, 1.4]),
            "frequency_penalty": draw.choice([0.0, 0.0, 0.7]),
            "presence_penalty": draw.choice([0.0, 0.0, -0.4]),
            "logit_bias": draw.choice([(), ((3, 2.5), (8, -7.0), (3, 0.5))]),
            "min_tokens": draw.choice([0, 3]),
        }
        output = [draw.randrange(vocabulary) for _ in range(draw.randrange(6))]
        sequences.append(sequence(output, seed=number - count // 2, stop_token_ids=(4,), **fields))
    return rows, sequences


@pytest.mark.slow
def test_10_000_rows_of_one_batch_are_those_of_the_reference_and_of_any_other_batch(monkeypatch):
    monkeypatch.setattr(sampling, "NUCLEUS", 16)  # the nucleus of many rows has more tokens
    rows, sequences = rows_and_sequences(10_000, 40)
    together = sample(rows, sequences)
    assert together == [token_of(*pair) for pair in zip(rows.tolist(), sequences, strict=True)]
    monkeypatch.setattr(sampling, "_AT_ONCE", 40 * 7)
    order = list(range(10_000))
    random.Random(1).shuffle(order)
    for first in range(0, 3000, 300):
        some = order[first : first + 300]
        assert sample(rows[some], [sequences[at] for at in some]) == [together[at] for at in some]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [SETTINGS[0], SETTINGS[-1]])
def test_seeds_draw_as_often_as_the_chances_say(fields):
    """The chi-square of 5,000 seeds; it passes 4 standard deviations of its mean once in ten thousand times."""
    row, count = row_of(30, 8), 5_000
    asked = [sequence(seed=seed, **fields) for seed in range(count)]
    found = Counter(sample(row.expand(count, -1), asked))
    wanted = {token: count * p for token, p in enumerate(warped(row, asked[0].request.params, []).tolist())}
    assert set(found) <= {token for token, w in wanted.items() if w > 0}
    often = [token for token, w in wanted.items() if w > 5]
    square = sum((found[token] - wanted[token]) ** 2 / wanted[token] for token in often)
    assert square < len(often) + 4 * math.sqrt(2 * len(often)) + 8


def test_a_narrow_nucleus_says_so_and_the_order_of_all_is_the_same():
    row, numbers = torch.zeros(50), [at / 200 for at in range(200)]
    params = SamplingParams(seed=1, temperature=1.0, top_p=0.5)
    assert set(drawn(row + torch.arange(50) * 1e-3, numbers, params, 10)) == {NARROW}
    found = drawn(row + torch.arange(50) * 1e-3, numbers, params, 50)
    assert set(found) == set(range(25, 50))
    ranked = SamplingParams(seed=1, temperature=1.0, top_k=10, top_p=0.99)
    assert NARROW not in drawn(row + torch.arange(50) * 1e-3, numbers, ranked, 10)
    assert set(drawn(row, numbers, ranked, 10)) == {NARROW}, "all are like the tenth"
    assert set(drawn(row, numbers, ranked, 50)) == set(range(50))


def test_no_token_is_left_where_all_are_forbidden():
    params = SamplingParams(seed=1)
    assert drawn(torch.full((9,), -math.inf), [0.3], params, 0) == [NONE_LEFT]
    assert drawn(torch.full((9,), -math.inf), [0.3], params, 5) == [NONE_LEFT]
    assert drawn(torch.full((9,), -math.inf), [0.3], SamplingParams(seed=1, top_k=3), 5) == [NONE_LEFT]


def test_numbers_are_a_function_of_seed_position_and_turn():
    assert drawn_number(0, 0, False) == 0.1715401303266132
    assert drawn_number(-1, 7, True) == drawn_number((1 << 64) - 1, 7, True) == 0.8994404524144097
    numbers = [
        drawn_number(seed, at, again)
        for seed in range(-50, 50)
        for at in range(50)
        for again in (False, True)
    ]
    assert len(set(numbers)) == len(numbers) and all(0.0 <= one < 1.0 for one in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01


@given(st.integers(1, 40), st.lists(st.binary(min_size=5, max_size=5), min_size=1, max_size=4))
def test_masks_are_unpacked_as_numpy_unpacks_them(vocabulary, rows):
    bits = np.stack([np.frombuffer(row, np.uint8) for row in rows])
    wanted = np.unpackbits(bits, axis=1, count=vocabulary, bitorder="little") == 0
    assert np.array_equal(forbidden_of(torch.from_numpy(bits.copy()), vocabulary).numpy(), wanted)
