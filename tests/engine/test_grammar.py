"""Answers that follow a grammar: valid whatever the weights say, the same however a node runs them."""

import json
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afserve.config import EngineConfig, ModelSource
from afserve.engine.draws import forbidden_of
from afserve.engine.sampler import Failure, Sampler
from afserve.engine.scheduling.guides import Guide
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.step.step_buffers import StepBuffers
from afserve.errors import RequestError
from afserve.grammars.grammar import (
    Compiler,
    of_choice,
    of_lark,
    of_object,
    of_regex,
    of_schema,
)
from afserve.kernels.devices.opened import device_of
from afserve.kernels.ops import open_ops
from afserve.tokens.tokenizer import Tokenizer
from tests.engine.local_cluster import LocalCluster

NANO = Path("configs/nano")
VOCABULARY = 2048
END = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"$ref": "#/$defs/size"}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
    "$defs": {"size": {"type": "integer", "minimum": 1, "maximum": 99}},
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(NANO)


@pytest.fixture(scope="module")
def compiler():
    return Compiler(NANO, VOCABULARY, (END,))


@pytest.fixture
def nano():
    """Makes a cluster of the bundled model: one attention node, one expert node."""

    def build(**fields):
        config = EngineConfig(
            **{"max_model_len": 512, "kv_blocks": 128, "block_size": 8, "max_batch_tokens": 64, **fields}
        )
        return LocalCluster.build(ModelSource(str(NANO), "nano"), config)

    return build


def ask(handle, prompt, grammar, *, generated=(), **params):
    given = SamplingParams(**{"max_tokens": 200, "temperature": 0.0, "seed": 7, "grammar": grammar, **params})
    return GenerationRequest(handle, tuple(prompt), given, generated)


def run(cluster, requests):
    """Tokens and last event of each request."""
    for request in requests:
        cluster.submit(request)
    tokens: dict[int, list[int]] = {r.handle: [] for r in requests}
    last = {}
    while any(node.busy for node in cluster.attention):
        for event in cluster.step():
            tokens[event.handle] += event.token_ids
            last[event.handle] = event
    return tokens, last


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_follows_its_schema(nano, tokenizer, temperature):
    prompt = tokenizer.encode("def size():")
    grammar = of_schema(SCHEMA)
    params = {"temperature": temperature, "logprobs": 2, "frequency_penalty": 0.5}
    tokens, last = run(nano(), [ask(i, prompt, grammar, **{**params, "seed": i}) for i in range(3)])
    for handle, ids in tokens.items():
        assert last[handle].finish_reason == "stop", last[handle].error
        said = json.loads(tokenizer.decode(ids))
        assert isinstance(said["name"], str) and all(1 <= size <= 99 for size in said["sizes"])


@pytest.mark.slow
def test_other_requests_do_not_notice(nano, tokenizer):
    prompt = tokenizer.encode("def add(x, y):")
    plain = GenerationRequest(0, tuple(prompt), SamplingParams(max_tokens=24, temperature=0.0))
    alone, _ = run(nano(), [plain])
    both, _ = run(nano(), [plain, ask(1, prompt, of_choice(["yes", "no"]))])
    assert both[0] == alone[0]
    assert tokenizer.decode(both[1]) in ("yes", "no")


@pytest.mark.slow
def test_the_best_token_is_taken_where_it_is_allowed(nano, tokenizer):
    """A grammar that allows everything changes nothing."""
    prompt = tokenizer.encode("def add(x, y):")
    plain = GenerationRequest(0, tuple(prompt), SamplingParams(max_tokens=24, temperature=0.0))
    tokens, _ = run(nano(), [plain, ask(1, prompt, of_regex(r"(.|\n)*"), max_tokens=24)])
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_it_is_the_same_after_preemption_and_on_another_node(nano, tokenizer):
    prompts = [tokenizer.encode(text) for text in ("def a():", "class B:", "import c", "x = [")]
    wanted = [
        ask(i, p, of_regex("[a-z]{40}[0-9]{40}"), temperature=1.0, seed=i) for i, p in enumerate(prompts)
    ]
    roomy, _ = run(nano(), wanted)
    small = nano(kv_blocks=20)
    assert run(small, wanted)[0] == roomy
    assert small.attention[0].stats().preemptions > 0
    moved = [
        ask(i, p, of_regex("[a-z]{40}[0-9]{40}"), temperature=1.0, seed=i, generated=tuple(roomy[i][:11]))
        for i, p in enumerate(prompts)
    ]
    assert run(nano(), moved)[0] == {i: ids[11:] for i, ids in roomy.items()}


@pytest.mark.slow
def test_tokens_that_do_not_follow_it_end_the_request(nano, tokenizer):
    tokens, last = run(
        nano(), [ask(0, [5, 6, 7], of_choice(["yes"]), generated=tuple(tokenizer.encode("no")))]
    )
    assert tokens == {0: []} and last[0].finish_reason == "error"
    assert last[0].error.startswith("grammar: not a grammar that can be followed")


class Evens(Guide):
    """Allows every other token."""

    def __init__(self):
        super().__init__(Future())

    def allows(self, tokens, start, token):
        return token % 2 == 0

    def allowed_B(self, tokens, start):
        return np.packbits(np.arange(6) % 2 == 0, bitorder="little")


class Nothing(Evens):
    """Allows no token at all."""

    def allows(self, tokens, start, token):
        return False

    def allowed_B(self, tokens, start):
        return np.zeros(1, np.uint8)


class Broken(Evens):
    def allows(self, tokens, start, token):
        raise RequestError("grammar: broken")

    def allowed_B(self, tokens, start):
        raise RequestError("grammar: broken")


def sample(logits_RV, sequences):
    return Sampler(open_ops("cpu", 1), StepBuffers(device_of(torch.device("cpu")), 1)).sample(
        logits_RV, sequences
    )


def guided(guide, seed=0, **params):
    given = SamplingParams(**{"temperature": 0.0, "seed": seed, "grammar": "x", **params})
    return Sequence.start(GenerationRequest(0, (1,), given), 0, frozenset(), guide=guide)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(-3, 3), min_size=6, max_size=6),
            st.sampled_from([None, Evens, Nothing, Broken]),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_rows_that_are_masked_together_get_what_each_gets_alone(rows):
    """Row by row: logits, grammar, and a bias that lets it be drawn."""
    logits = torch.tensor([row for row, _, _ in rows], dtype=torch.float32)
    sequences = [
        guided(guide and guide(), **({"logit_bias": ((5, 0.0),)} if biased else {}))
        for _, guide, biased in rows
    ]
    found = sample(logits, sequences)
    for at, (row, guide, _) in enumerate(rows):
        assert found[at] == sample(logits[at : at + 1], sequences[at : at + 1])[0]
        if guide in (Nothing, Broken):
            assert isinstance(found[at], Failure)
        else:
            allowed = row[::2] if guide is Evens else row
            token = found[at]
            assert isinstance(token, int)
            assert row[token] == max(allowed) and (guide is None or token % 2 == 0)


@pytest.mark.slow
def test_a_draw_holds_where_almost_nothing_of_the_probability_is_allowed():
    logits = torch.tensor([[0.0, 900.0, 1.0, 0.0, 2.0, 0.0]])
    counts = torch.zeros(6)
    for seed in range(2000):
        sequence = guided(Evens(), seed, temperature=1.0)
        (token,) = sample(logits, [sequence])
        assert isinstance(token, int)
        counts[token] += 1
    wanted = torch.tensor([0.0, float("-inf"), 1.0, float("-inf"), 2.0, float("-inf")]).softmax(-1)
    assert torch.allclose(counts / 2000, wanted, atol=0.04)


@pytest.mark.by_day(every=2)
@pytest.mark.parametrize("cut", [{}, {"top_k": 6}])
@pytest.mark.slow
def test_draws_are_as_likely_as_among_the_allowed_tokens(cut):
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0, 0.0, 2.0])
    wanted = torch.where(torch.arange(6) % 2 == 0, logits, float("-inf")).softmax(-1)
    counts = torch.zeros(6)
    for seed in range(3000):
        params = SamplingParams(temperature=1.0, seed=seed, grammar="x", **cut)
        sequence = Sequence.start(GenerationRequest(0, (1,), params), 0, frozenset(), guide=Evens())
        (token,) = sample(logits[None], [sequence])
        assert isinstance(token, int)
        counts[token] += 1
    assert torch.allclose(counts / 3000, wanted, atol=0.04)


@pytest.mark.parametrize(
    "grammar, text",
    [
        (of_object(), '{"a": [1, {"b": null}]}'),
        (of_regex(r"\d{4}-\d{2}"), "2031-07"),
        (of_choice(['say "hi"', "é"]), "é"),
        (of_lark('start: "a" | "b" start'), "bba"),
        (of_lark('root ::= "x" [0-9]+'), "x12"),
    ],
)
def test_what_is_allowed(compiler, tokenizer, grammar, text):
    matcher = compiler.compile(grammar)
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert (
            matcher.allows(token)
            and not forbidden_of(torch.tensor(matcher.allowed_B()[None]), VOCABULARY)[0, token]
        )
        matcher.consume([token])
    assert matcher.is_complete or matcher.allows(END)


@pytest.mark.parametrize(
    "grammar, words",
    [
        (lambda param: of_regex("(", param), "unclosed group"),
        (lambda param: of_regex("(?=x)y", param), "look-around"),
        (lambda param: of_schema({"$ref": "#/nowhere"}, param), "nowhere"),
        (lambda param: of_schema({"uniqueItems": True, "type": "array"}, param), "uniqueItems"),
        (lambda param: of_lark("start: nothing", param), "nothing"),
        (lambda param: of_choice(["x" * 200_000], param), "characters"),
    ],
)
def test_what_is_refused(compiler, grammar, words):
    with pytest.raises(RequestError, match=words) as refused:
        compiler.compile(grammar("response_format"), "response_format")
    assert refused.value.param == "response_format"


def test_half_a_character_is_refused(compiler):
    for made in (of_regex, of_lark, lambda text, param: of_choice(["a", text], param)):
        with pytest.raises(RequestError, match=r"guided_regex: .*surrogate") as refused:
            made("\ud800", "guided_regex")
        assert refused.value.param == "guided_regex"
    with pytest.raises(RequestError, match="not a grammar that can be followed"):
        compiler.compile('{"grammars": "\ud800"}')


def test_a_grammar_needs_the_end_of_the_text():
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(grammar=of_object(), ignore_eos=True)
