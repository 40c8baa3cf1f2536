"""What is expected as the answer, used as a draft: the same tokens in fewer steps, and none where a request says so."""

import json
from typing import Any

import pytest

from afserve import errors
from afserve.clock import FakeClock
from afserve.config import ModelSource
from afserve.control.node.kept import KeptRequests
from afserve.control.wire.messages import (
    decode_from_attention,
    decode_to_attention,
    encode_from_attention,
    encode_to_attention,
)
from afserve.control.wire.request_values import Submit, Tokens
from afserve.engine.build import colocated
from afserve.engine.draft.counts import NAMES
from afserve.engine.draft.forced import ForcedDrafter
from afserve.engine.draft.ngram import NgramDrafter
from afserve.engine.draft.prediction import PredictionDrafter
from afserve.engine.draft.suffix import SuffixDrafter
from afserve.engine.scheduling.request import GenerationRequest, Predicted, SamplingParams, TokenEvent
from afserve.engine.scheduling.sequence import Sequence
from tests.engine.driving import collect, config, drive

PROMPT = (5, 9, 17, 33, 40, 21)
LONG = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)


def followed(expected, answer, most=4):
    """What is drafted behind each beginning of an answer."""
    request = GenerationRequest(0, PROMPT, SamplingParams(max_tokens=99), prediction=tuple(expected))
    sequence, drafter = Sequence.start(request, 0, frozenset()), PredictionDrafter()
    found = [list(drafter.guess(sequence, most).tokens)]
    for token in answer:
        sequence.tokens.append(token)
        found.append(list(drafter.guess(sequence, most).tokens))
    return found


def test_an_answer_is_followed_through_what_is_expected():
    expected = list(range(50, 60))
    assert followed(expected, [50, 51]) == [[50, 51, 52, 53], [51, 52, 53, 54], [52, 53, 54, 55]]
    assert followed(expected, expected)[-2:] == [[59], []]
    assert followed((), [50]) == [[], []]


def test_it_goes_on_behind_a_change():
    """Words replaced, put in and left out; three tokens must agree."""
    expected = list(range(50, 80))
    for change in ([50, 51, 7, 8, 53, 54, 55], [50, 51, 7, 52, 53, 54], [50, 51, 60, 61, 62]):
        *before, last = followed(expected, change)
        assert last == [change[-1] + n for n in range(1, 5)] and before[-1] == []


def test_the_next_place_is_taken_of_several():
    expected = [1, 2, 3, 10, 1, 2, 3, 20, 9, 1, 2, 3, 30]
    assert followed(expected, [1, 2, 3, 10, 8, 1, 2, 3], 1)[-1] == [20]
    assert followed(expected, [*expected, 1, 2, 3], 1)[-1] == [30], "behind the last one: that again"


def test_a_long_one_is_looked_into_in_pieces():
    expected = [n % 251 for n in range(40_000)]
    expected[30_000:30_003] = [300, 301, 302]
    steps = [bool(draft) for draft in followed(expected, [400, *[300, 301, 302] * 9])]
    assert not any(steps[1:4]) and any(steps[5:])


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram:4", "suffix:4"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_without_it(method, temperature, tiny_checkpoint):
    """Of an answer that is known all is right; of one that was changed what is left of it."""
    params = SamplingParams(max_tokens=48, temperature=temperature, seed=3, ignore_eos=True, logprobs=2)
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    plain = colocated(source, config())
    events = drive(plain, [GenerationRequest(0, PROMPT, params)])
    (answer,) = collect(events)
    for expected, all_right in (
        (answer, True),
        ((*answer[:9], 7, *answer[12:]), False),
        ((3, 4) * 20, False),
    ):
        node = colocated(source, config(draft=method))
        asked = GenerationRequest(0, PROMPT, params, prediction=tuple(expected))
        found = drive(node, [asked])
        assert collect(found) == [answer]
        assert [e for event in found for e in event.logprobs] == [
            e for event in events for e in event.logprobs
        ]
        drafts = node.stats().drafts.drafters.prediction
        told = [event.predicted for event in found if any(event.predicted)]
        accepted, rejected = (sum(each) for each in zip(*told, strict=True)) if told else (0, 0)
        assert (accepted, accepted + rejected) == (drafts.accepted, drafts.tokens)
        if all_right:
            assert rejected == 0 and accepted > 24 and node.stats().steps < plain.stats().steps


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 2.5, 4])
def test_acceptance_is_what_a_benchmark_asks_for(length, tiny_checkpoint):
    """Of answers that are known, and with the same answers."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    (answer,) = collect(drive(colocated(source, config()), [GenerationRequest(0, PROMPT, params)]))
    asked = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
    node = colocated(
        source, config(speculative_config=json.dumps(asked | {"synthetic_acceptance_length": length}))
    )
    assert collect(drive(node, [GenerationRequest(0, PROMPT, params, prediction=tuple(answer))])) == [answer]
    found = node.stats().drafts.drafters.prediction
    mean = 1 + found.accepted / found.drafts
    assert abs(mean - length) < (0.15 if length in (1, 2, 4) else 0.4) and found.tokens > 2.5 * found.drafts


@pytest.mark.slow
def test_a_request_may_be_without_drafts(tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    (answer,) = collect(drive(colocated(source, config()), [GenerationRequest(0, PROMPT, LONG)]))
    for draft, longest in ((0, 0), (2, 2), (None, 4)):
        node = colocated(source, config(draft="ngram:4"))
        params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True, draft=draft)
        asked = GenerationRequest(0, PROMPT, params, prediction=tuple(answer))
        assert collect(drive(node, [asked])) == [answer]
        positions = node.stats().drafts.positions
        assert [bool(getattr(positions, f"p{n}")) for n in range(5)] == [n < longest for n in range(5)]


def test_what_is_expected_is_checked(tiny_checkpoint):
    node = colocated(ModelSource(str(tiny_checkpoint("qwen3")), "qwen3"), config(draft="ngram"))
    for token in (-1, 1 << 20):
        with pytest.raises(errors.RequestError) as refused:
            node.submit(GenerationRequest(0, PROMPT, LONG, prediction=(1, token)))
        assert refused.value.param == "prediction"
    wrong: list[Any] = [-1, 17, True, 1.5]
    for draft in wrong:
        with pytest.raises(errors.RequestError, match=r"^draft: "):
            SamplingParams(draft=draft)


def test_it_travels():
    for draft in (None, 0, 16):
        request = GenerationRequest(3, PROMPT, SamplingParams(draft=draft), prediction=(4, 5, 1 << 20))
        assert decode_to_attention(encode_to_attention(Submit(request))) == Submit(request)
    told = TokenEvent(3, (1, 2), predicted=Predicted(1, 2))
    heard = decode_from_attention(encode_from_attention(Tokens((told,))))
    assert isinstance(heard, Tokens) and heard.events[0].predicted == Predicted(1, 2)


def test_who_asks_again_is_told_of_what_it_missed():
    """A gateway whose stream broke; the others were told before."""
    kept = KeptRequests(5.0, FakeClock())
    kept.open(GenerationRequest(3, PROMPT, LONG), 0)
    for tokens, predicted in (((1, 2), Predicted(1, 2)), ((3,), Predicted()), ((4, 5), Predicted(1, 0))):
        kept.add(TokenEvent(3, tokens, predicted=predicted))
    for start, missed in ((0, Predicted(2, 2)), (2, Predicted(1, 0)), (4, Predicted(1, 0)), (5, Predicted())):
        told = kept.resume(3, start)
        assert (told.predicted if isinstance(told, TokenEvent) else Predicted()) == missed


def test_every_drafter_is_counted_apart():
    named = [each.name for each in (ForcedDrafter, NgramDrafter, PredictionDrafter, SuffixDrafter)]
    assert set(named) <= set(NAMES)
