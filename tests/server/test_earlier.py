"""Answers keep the token ids that they were generated with in the prompts of the turns that follow, whatever the
family's template; the text of a prompt is never another one."""

import random
import re
import threading
from array import array

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Vocabulary

from afserve.control.backend import CacheKept
from afserve.server.answers.earlier import AnswerTokens
from afserve.tokens.chat_template import ChatTemplate
from afserve.tokens.tokenizer import Tokenizer
from tests.server.family_templates import FAMILIES
from tests.server.nano import FOLDER

# What a template writes as one token: between bars, and a few words of their own.
MARKS = re.compile(r"<\|[^<>|]*\|>|<｜[^<>｜]*｜>|\]~b\]|\[e~\[|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>|</?s>")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
MOST = 1 << 16
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<｜[]|~"), min_size=1, max_size=40).map(
    lambda text: f"x{text}y"  # templates take white space off the ends
)


def tokenizer_of(template):
    """nano's, with the template's marks as special tokens; of words that may run over them."""
    vocabulary = Vocabulary.from_file(str(FOLDER / "tokenizer.json"))
    vocabulary.add_special_tokens(
        [AddedToken(mark, normalized=False) for mark in sorted({*ROLES, *MARKS.findall(template)})]
    )
    return Tokenizer(vocabulary, {"bos_token": "<s>", "eos_token": "</s>"})


FOUND = {
    name: (
        ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}),
        tokenizer_of(template + "<s></s>"),
    )
    for name, (template, *_) in FAMILIES.items()
}


def spelled(tokenizer, text, draw):
    """The tokens of a text as a model may choose them: of its parts, each alone."""
    places = sorted(draw.sample(range(len(text) + 1), min(3, len(text))))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return [id for part in parts for id in tokenizer.encode(part, add_special_tokens=False)]


def written(tokenizer, text):
    return array("i", tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("family", FOUND)
@given(words=st.lists(WORDS, min_size=2, max_size=4), seed=st.integers(0, 1 << 32))
@settings(max_examples=25)
def test_each_turn_begins_with_the_last_ones_prompt_and_answer(family, words, seed):
    template, tokenizer = FOUND[family]
    kept, draw = AnswerTokens(tokenizer, MOST), random.Random(seed)
    messages, before = [{"role": "system", "content": "Be short."}], array("i")
    for number, said in enumerate(words):
        messages.append({"role": "user", "content": f"Question {number}"})
        text = template.render(messages)
        canonical = written(tokenizer, text)
        prompt = kept.as_generated(canonical, "")
        assert tokenizer.decode(prompt, skip_special_tokens=False) == text
        assert prompt[: len(before)] == before, "not what was generated"
        messages.append({"role": "assistant", "content": said})
        whole = template.render([*messages, {"role": "user", "content": "?"}])
        assert whole.startswith(text)
        own = whole[len(text) : whole.index(said, len(text)) + len(said)]
        answer = spelled(tokenizer, own, draw)
        assert tokenizer.decode(answer, skip_special_tokens=False) == own
        kept.keep_answer(canonical, answer, "")
        ends = MARKS.match(whole, len(text) + len(own)) is not None
        before = prompt + array("i", answer) if ends else array("i")


@pytest.fixture
def kept(tokenizer):
    return AnswerTokens(tokenizer, 700)


def other_spelling(tokenizer, text):
    return [id for letter in text for id in tokenizer.encode(letter, add_special_tokens=False)]


def turn(tokenizer):
    return written(tokenizer, "<|user|>q<|end|><|assistant|>")


def test_no_other_key_or_salt_finds_an_answer(tokenizer, kept):
    kept.keep_answer(turn(tokenizer), other_spelling(tokenizer, "quick"), "mine")
    asked = turn(tokenizer) + written(tokenizer, "quick<|end|><|user|>z<|end|><|assistant|>")
    assert kept.as_generated(asked, "") is asked and kept.as_generated(asked, "other") is asked
    assert kept.as_generated(asked, "mine") != asked


def test_what_is_as_the_tokenizer_writes_it_is_not_kept(tokenizer, kept):
    kept.keep_answer(turn(tokenizer), tokenizer.encode("quick", add_special_tokens=False), "")
    kept.keep_answer(turn(tokenizer), other_spelling(tokenizer, "quick brown"), "")
    assert len(kept) == 1


def test_the_oldest_make_room(tokenizer, kept):
    prompts = [written(tokenizer, f"<|user|>{number}<|end|><|assistant|>") for number in range(40)]
    for prompt in prompts:
        kept.keep_answer(prompt, other_spelling(tokenizer, "quick"), "")
        kept.as_generated(prompts[0] + written(tokenizer, "quick<|end|>"), "")  # this one is used
    after = [prompt + written(tokenizer, "quick<|end|>") for prompt in prompts]
    found = [kept.as_generated(prompt, "") is not prompt for prompt in after]
    assert found[0] and found[-1] and not all(found) and kept._tokens <= 700
    kept.keep_answer(prompts[0], other_spelling(tokenizer, "quick " * 50), "")
    assert kept._tokens <= 700


def test_of_two_answers_with_one_beginning_the_longer_counts(tokenizer):
    kept = AnswerTokens(tokenizer, MOST)
    prompt = turn(tokenizer)
    short, whole = (other_spelling(tokenizer, text) for text in ("quick", "quick<|user|>brown"))
    kept.keep_answer(prompt, short, "")
    whole = [*short, *written(tokenizer, "<|user|>"), *other_spelling(tokenizer, "brown")]
    kept.keep_answer(prompt, whole, "")
    asked = prompt + written(tokenizer, "quick<|user|>brown<|end|>")
    assert list(kept.as_generated(asked, "")) == [*prompt, *whole, 1]


def test_over_http_the_next_turn_begins_with_what_was_generated(make_backend, run_server, tokenizer):
    """Streamed and not; with a prompt that leaves no more room the answer is shorter."""
    backend = make_backend()
    said = "the quick fox"
    spelled_out = other_spelling(tokenizer, said)
    backend.answer_to = lambda request: [*spelled_out, 1]
    with run_server(backend) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        hosted = next(iter(server.app.state.service.models))
        messages = [{"role": "user", "content": "hello"}]
        for stream in (False, True):
            reply = http.post("/v1/chat/completions", json={"messages": messages, "stream": stream})
            assert reply.status_code == 200
            asked = backend.requests[-1]
            assert len(asked.prompt_ids) + asked.params.max_tokens == 256
            hosted.keeper.submit(threading.Event).result(20)  # behind what is being kept
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
            assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
            begun = (*asked.prompt_ids, *spelled_out)
            assert backend.requests[-1].prompt_ids[: len(begun)] == begun
            http.post("/v1/messages", json={"messages": messages, "max_tokens": 3})
            assert backend.requests[-1].prompt_ids[: len(begun)] == begun


def test_what_was_warmed_of_a_chat_is_what_is_let_go(make_backend, run_server, tokenizer):
    backend, told = make_backend(), []
    spelled_out = other_spelling(tokenizer, "the quick fox")
    backend.answer_to = lambda request: [*spelled_out, 1]

    async def kept_cache(owner, *, unpin, prompt, salt):
        told.append((tuple(prompt), salt))
        return CacheKept((), complete=True)

    backend.kept_cache = kept_cache
    with run_server(backend) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        messages = [{"role": "user", "content": "hello"}]
        assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
        hosted = next(iter(server.app.state.service.models))
        hosted.keeper.submit(threading.Event).result(20)
        messages += [
            {"role": "assistant", "content": "the quick fox"},
            {"role": "user", "content": "and?"},
        ]
        for verb in ("warm", "unpin"):
            assert http.post(f"/v1/cache/{verb}", json={"messages": messages}).status_code == 200
    first, warmed = (request.prompt_ids for request in backend.requests)
    assert warmed[: len(first) + len(spelled_out)] == (*first, *spelled_out)
    assert told == [(warmed, "")]


def test_kept_answers_can_be_switched_off(make_backend, run_server, tokenizer):
    backend = make_backend()
    backend.answer_to = lambda request: [*other_spelling(tokenizer, "quick"), 1]
    with run_server(backend, answer_tokens=0) as server, httpx.Client(base_url=server.url) as http:
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hello"}]})
        hosted = next(iter(server.app.state.service.models))
        hosted.keeper.submit(threading.Event).result(20)
        assert not len(hosted.earlier)
