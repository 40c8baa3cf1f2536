"""Steps that decode several tokens of each sequence in one call: the tokens, keys and values of single steps, and when
there is no such step."""

from dataclasses import replace

import pytest

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.passes import PassTime
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.step.stack_runner import MOST_PASSES, StackRunner
from afserve.tracing.trace import Trace
from tests.engine.driving import BRIEF, collect, config, drive, prompts, requests
from tests.engine.test_kv_groups import KINDS

pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
SMALL = {"max_batch_tokens": 40, "block_size": 16, "kv_blocks": 24}  # windows of 20 tokens slide


@pytest.fixture
def passes(monkeypatch):
    """Passes of every step that was one call."""
    counts, decode = [], StackRunner.decode_step

    def noted(runner, *arguments):
        tokens = decode(runner, *arguments)
        counts.append(len(tokens))
        return tokens

    monkeypatch.setattr(StackRunner, "decode_step", noted)
    return counts


def opened(source, groups=(), **fields):
    """A node whose clock stands still, so that time allows as many passes as there are."""
    node = colocated(source, config(**{**SMALL, **fields}), groups)
    node._meter.now = lambda: 0.0
    return node


def by_layers(node):
    """What a trace is wanted of goes layer by layer, a token each step."""
    node.trace = Trace("attention-0")
    return node


def told(events):
    """By request: tokens, and how it ended. Each token is an event."""
    assert all(len(event.token_ids) == 1 for event in events if event.error is None)
    ends = {e.handle: (e.finish_reason, e.stop_token_id, e.error) for e in events if e.finish_reason}
    return {h: ([t for e in events if e.handle == h for t in e.token_ids], end) for h, end in ends.items()}


def kept(node):
    """What the cache has of each name."""
    named = node.kv.pool._block_of
    return {name: node.kv.read([block]).bytes_NY.tolist() for name, block in named.items()}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("v3", "bfloat16"),
        ("mixtral-window", "float32"),
        ("qwen3", "bfloat16"),
        ("dsa", "bfloat16"),
        ("qwen3-next", "bfloat16"),
        ("kimi-linear", "bfloat16"),
        ("granite4", "bfloat16"),
        ("lfm2", "float32"),
        ("nemotron-odd", "float32"),
        ("gemma4", "bfloat16"),
        ("cohere2", "bfloat16"),
    ],
)
def test_tokens_keys_and_values_are_those_of_single_steps(family, dtype, folder_of, passes):
    """Latent attention, windows, and groups of KV whose blocks differ in size; rows that an indexer chooses; states of
    every rule, which are kept at blocks' ends; what few families do between and around layers. Answers end at their
    lengths."""
    source = ModelSource(str(folder_of(family)), family, dtype=dtype)
    asked = [
        replace(one, params=replace(BRIEF, max_tokens=24 + 9 * one.handle)) for one in requests(prompts())
    ]
    groups = KINDS[family](24, 16, 40) if family in KINDS else ()
    node, single = opened(source, groups), by_layers(opened(source, groups))
    got = told(drive(node, asked))
    assert max(passes) == MOST_PASSES, "no step decoded several tokens"
    made = sum(passes)
    wanted = told(drive(single, asked))
    assert got == wanted and sum(passes) == made, "a trace wants to see every layer"
    assert kept(node) == kept(single) and kept(node)
    assert node.stats().steps == single.stats().steps and node.stats().preemptions == 0
    routed = [one.take_routed() for one in (node, single)]
    assert routed[0].decode_LE.tolist() == routed[1].decode_LE.tolist()


def test_a_step_ends_with_the_first_sequence_that_does(tiny_checkpoint, passes):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    said = collect(drive(opened(source), requests(prompts(), BRIEF)))
    first, second = (
        next(t for t in text[at:] if text.index(t) >= at) for text, at in zip(said, (5, 9), strict=False)
    )
    passes.clear()
    asked = [
        GenerationRequest(0, prompts()[0], replace(BRIEF, stop_token_ids=(first,))),
        GenerationRequest(1, prompts()[1], replace(BRIEF, stop_token_ids=(second,), min_tokens=4)),
        GenerationRequest(2, prompts()[2], BRIEF),
    ]
    node = opened(source)
    got = told(drive(node, asked))
    for handle, stop in ((0, first), (1, second)):
        assert got[handle] == (said[handle][: said[handle].index(stop) + 1], ("stop", stop, None))
    assert got[2] == (said[2], ("length", None, None))
    assert max(passes) > 1


@pytest.mark.parametrize("family", ["qwen3", "qwen3-next"])
def test_a_row_that_is_not_finite_ends_its_request_where_single_steps_say_so(family, tiny_checkpoint, passes):
    """With states, which such a row's step has moved, those beside it go back to their last whole block."""
    source = ModelSource(str(tiny_checkpoint(family)), family)
    said = collect(drive(opened(source), requests(prompts(), BRIEF)))
    seen = {token for text in prompts() for token in text}
    token = next(t for t in said[0][4:] if t not in seen and t not in said[0][:4])
    ended = []
    for node in (opened(source), by_layers(opened(source))):
        node._micro_batches[0]._model._embed_VH[token] = float("nan")
        ended.append(told(drive(node, requests(prompts(), BRIEF))))
        assert node.stats().kv_blocks_used == 0
    assert ended[0] == ended[1] and max(passes) > 1
    text, (reason, _, error) = ended[0][0]
    assert text == said[0][: said[0].index(token) + 1] and reason == "error"
    assert error.startswith("layer 0 gave values that are not finite")


@pytest.mark.parametrize(("fields", "moving", "single"), [({"max_sequences": 2}, False, 20), ({}, True, 20)])
def test_one_token_where_somebody_waits_or_looks(fields, moving, single, tiny_checkpoint, passes):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    node = opened(source, **fields)
    node.note_line(0, moving=moving)
    got = collect(drive(node, requests(prompts(), BRIEF)))
    assert set(passes[:single]) == {1} and (max(passes) == 1) == moving
    assert got == collect(drive(by_layers(opened(source)), requests(prompts(), BRIEF)))


ODD = (
    SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True),
    replace(BRIEF, logprobs=1),
    replace(BRIEF, repetition_penalty=1.1),
    replace(BRIEF, logit_bias=((5, 1.0),)),
    replace(BRIEF, return_routed_experts=True),
    replace(BRIEF, min_tokens=24),
)


def test_who_wants_more_than_the_likeliest_token_has_its_rows_read(tiny_checkpoint, passes):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    node, single = opened(source), by_layers(opened(source))
    for odd in ODD:
        pairs = zip(prompts((5, 17)), (BRIEF, odd), strict=True)
        asked = [GenerationRequest(i, *pair) for i, pair in enumerate(pairs)]
        got = drive(node, asked)
        assert not passes
        assert told(got) == told(drive(single, asked))


def test_a_request_leaves_and_others_lose_their_blocks_between_two_steps(tiny_checkpoint, passes):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    asked = requests(prompts((17, 33, 40)), replace(BRIEF, max_tokens=60))
    wanted = collect(drive(by_layers(opened(source, kv_blocks=24)), asked))
    node, events = opened(source, kv_blocks=10), []
    for request in asked:
        node.submit(request)
    while node.busy:
        events += node.step()
        node.check()
        if sum(event.handle == 0 for event in events) >= 9:
            node.cancel(0)
    text = {h: [t for e in events if e.handle == h for t in e.token_ids] for h in range(3)}
    assert text[0] == wanted[0][: len(text[0])] and [text[1], text[2]] == wanted[1:]
    assert len(text[0]) < 9 + MOST_PASSES and node.stats().preemptions and max(passes) > 1


def test_time_says_how_many():
    time = PassTime()
    assert time.most_passes(16) == 1 and time.most_passes(0) == 0, "one is measured first"
    for seconds, most in ((0.001, 10), (0.0051, 1), (0.5, 1), (0.0001, 16), (0.0, 16)):
        time.measured(4, 4 * seconds)
        assert time.most_passes(16) == most
    assert time.most_passes(3) == 3
    time.other_step()
    assert time.most_passes(16) == 1
