"""Suffix drafts against a search of the whole text; what is kept is bounded, and of one tenant and salt alone."""

import random
from typing import Any

import pytest

from afserve.drafts import SuffixOptions
from afserve.engine.draft.drafter import NO_DRAFT
from afserve.engine.draft.earlier_answers import EarlierAnswers
from afserve.engine.draft.ngram import NgramDrafter
from afserve.engine.draft.own_text import PIECE, OwnTexts
from afserve.engine.draft.places import DEPTH, WALK, GramPlaces
from afserve.engine.draft.suffix import SuffixDrafter
from afserve.engine.scheduling.request import NO_TENANT, GenerationRequest, Purpose, SamplingParams, Tenant
from afserve.engine.scheduling.sequence import Sequence

PARAMS = SamplingParams(max_tokens=900)


def running(tokens, output=(), order=0, **fields):
    request = GenerationRequest(order, tuple(tokens), fields.pop("params", PARAMS), **fields)
    sequence = Sequence.start(request, order, frozenset())
    sequence.tokens += output
    return sequence


def searched(tokens, last, oldest):
    """The same by looking at every place."""
    found: dict[int, list[int]] = {}
    for place in range(len(tokens) - 1, max(oldest, 1), -1):
        length = 0
        while length < min(len(last), place) and tokens[place - 1 - length] == last[-1 - length]:
            length += 1
        found.setdefault(length, []).append(place)
    longest = max(found, default=0)
    return (longest, found[longest]) if longest >= 2 else (0, [])


@pytest.mark.parametrize("size", [16, 1024])
def test_the_longest_end_is_found_where_it_stood(size):
    """Whole where it stood no more often than is looked at; of a longer text than is kept, in what is kept."""
    draw, met = random.Random(size), 0
    for letters in (3, 9, 40):
        tokens: list[int] = []
        places = GramPlaces(tokens, size)
        for _ in range(300):
            tokens.append(draw.randrange(letters))
            places.read(3)
            assert places.known == len(tokens) - 1
            last = tokens[-DEPTH:]
            length, found = places.find(last)
            wanted, at = searched(tokens, last, places.known - size)
            runs = searched(tokens, last[-2:], places.known - size)[1]
            if len(runs) <= WALK:
                assert (length, found) == (wanted, at)
                met += bool(at)
            else:  # more often than is looked at: real places nonetheless
                assert length <= wanted
                for place in found:
                    assert tokens[place - length : place] == last[len(last) - length :]
    assert met > 200


def test_a_list_of_its_own_is_cut_and_places_stay_where_they_are():
    tokens: list[int] = []
    places, draw = GramPlaces(tokens, 64), random.Random(1)
    whole: list[int] = []
    for _ in range(2000):
        new = [draw.randrange(6) for _ in range(draw.randint(1, 9))]
        tokens += new
        whole += new
        places.read(1 << 20)
        places.trim()
        assert len(tokens) <= 3 * 64 + DEPTH and places.end == len(whole)
        length, found = places.find(whole[-DEPTH:])
        for place in found:
            assert whole[place - length : place] == whole[len(whole) - length :]
            assert places.behind(place, 5) == whole[place : place + 5]


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ((1, 2, 3), []),
        ((1, 2, 7, 8, 9, 1, 2), [7, 8]),  # no longer than what stood before
        ((1, 2, 7, 1, 2, 8, 1, 2, 7, 4, 1, 2), [7]),  # most often; then 4 of 2, which makes 1/3
        ((4, 1, 2, 7, 3, 9, 1, 2, 8, 5, 5, 4, 1, 2), [7, 3, 9]),  # the longest
    ],
)
def test_what_follows_most_often_is_guessed(tokens, wanted):
    draft = SuffixDrafter(SuffixOptions(least=0.34)).guess(running(tokens), 4)
    assert list(draft.tokens) == wanted and len(draft.confidence) == len(wanted)


def confidence(tokens):
    return SuffixDrafter(SuffixOptions(least=0.3)).guess(running(tokens), 1).confidence[0]


def test_confidence_grows_with_the_run_and_with_places_that_agree():
    once = confidence((1, 2, 7, 5, 1, 2))
    assert once == pytest.approx(0.5)
    assert once < confidence((1, 2, 7, 5, 1, 2, 7, 6, 1, 2)) < 1, "twice"
    assert once < confidence((9, 1, 2, 7, 5, 9, 1, 2)) < 1, "behind three tokens"
    assert once > confidence((1, 2, 7, 1, 2, 8, 3, 1, 2, 7, 4, 1, 2)), "of three places two agree"


def test_earlier_answers_of_one_tenant_and_salt_are_nobody_elses():
    drafter = SuffixDrafter()
    answer = tuple(range(50, 90))
    others: list[dict[str, Any]] = [
        {},
        {"tenant": Tenant("b")},
        {"tenant": Tenant("a"), "cache_salt": "x"},
        {"cache_salt": "a"},
    ]
    mine: dict[str, Any] = {"tenant": Tenant("a")}
    drafter.forget(running((3, 4), answer, 1, **mine))
    asked = (7, *answer[:9])
    assert list(drafter.guess(running(asked, order=2, **mine), 4).tokens) == list(answer[9:13])
    for order, other in enumerate(others, 3):
        assert drafter.guess(running(asked, order=order, **other), 4) == NO_DRAFT
    drafter.forget(running((3, 4), (*answer[:10], 9, 9), 20, **others[1]))
    assert list(drafter.guess(running(asked, order=2, **mine), 2).tokens) == [59, 60]
    assert list(drafter.guess(running(asked, order=4, **others[1]), 2).tokens) == [59, 9]


def test_options_are_followed():
    text = (1, 2, 7, 8, 9, 6, 1, 2)
    assert list(SuffixDrafter(SuffixOptions(factor=2.0)).guess(running(text), 9).tokens) == [7, 8, 9, 6]
    drafter = SuffixDrafter(SuffixOptions(earlier=False))
    drafter.forget(running((3,), text, 1))
    assert drafter.guess(running((1, 2), order=2), 9) == NO_DRAFT


def test_no_answer_goes_on_in_the_next_one_and_a_prompt_is_none():
    drafter = SuffixDrafter()
    drafter.forget(running((5, 6, 7, 8), (1, 2, 3), 1))
    drafter.forget(running((5, 6), (9, 9), 2))
    assert list(drafter.guess(running((4, 1, 2), order=3), 4).tokens) == [3]
    assert drafter.guess(running((4, 2, 3), order=4), 4) == NO_DRAFT
    assert drafter.guess(running((4, 5, 6), order=5), 4) == NO_DRAFT


def test_the_oldest_answers_leave_and_numbers_of_owners_are_bounded(monkeypatch):
    earlier = EarlierAnswers(cached=256)
    first = running(range(3), range(10, 30), 1)
    earlier.add(first)
    assert earlier.find(running(range(10, 20), order=2))[1][0] == 10
    for n in range(40):
        earlier.add(running((1,), range(100 + n * 30, 120 + n * 30), 3, tenant=Tenant(f"t{n}")))
        earlier.find(first)
    assert earlier.find(running(range(10, 20), order=2))[1] == (0, [])
    assert len(earlier._tokens) < 3 * 256
    monkeypatch.setattr("afserve.engine.draft.earlier_answers._OWNERS", 5)
    for n in range(9):
        earlier.add(running((1,), range(20), 3, tenant=Tenant(f"u{n}")))
    assert len(earlier._numbers) < 42
    asked = running(range(10), order=9, tenant=Tenant("t0"))
    assert earlier.find(asked)[1] == (0, []) and NO_TENANT.name == ""


def test_rows_for_other_nodes_and_vectors_are_no_answers():
    earlier = EarlierAnswers()
    one = SamplingParams(max_tokens=1)
    earlier.add(running((1, 2), (0,), purpose=Purpose.PROMPT, params=one))
    earlier.add(running((1, 2), (0,), params=SamplingParams(max_tokens=1, pooled=True)))
    earlier.add(running((1, 2)))
    assert not earlier._tokens


def test_a_long_prompt_is_read_in_pieces_and_only_its_end_is_kept(monkeypatch):
    monkeypatch.setattr("afserve.engine.draft.own_text.MOST", 4 * PIECE)
    own, sequence = OwnTexts(), running(range(20 * PIECE))
    for piece in range(1, 6):
        places, (length, _) = own.find(sequence)
        assert places.known == min((16 + piece) * PIECE, 20 * PIECE - 1) and length == 0
    sequence.tokens += range(18 * PIECE, 18 * PIECE + 30)
    assert places.size == 4 * PIECE
    for _ in range(2):
        _, (length, found) = own.find(sequence)
    assert (length, found) == (DEPTH, [18 * PIECE + 30])
    sequence.tokens += range(3 * PIECE, 3 * PIECE + 30)  # what stood there is not kept
    assert own.find(sequence)[1] == (0, [])
    own.forget(sequence)
    assert not own._by_order


def test_a_text_that_outgrows_its_window_gets_a_larger_one():
    drafter, sequence = NgramDrafter(), running((1, 2, 3))
    for n in range(5000):
        sequence.tokens.append(10 + n)
        if n % 50 == 0:
            drafter.guess(sequence, 2)
    sequence.tokens += [12, 13, 14]
    for _ in range(3):
        draft = drafter.guess(sequence, 2)
    assert list(draft.tokens) == [15, 16]
