"""The completions endpoint over a real socket, with the official client and plain HTTP."""

import asyncio

import httpx
import openai
import pytest
from tokenizers import Tokenizer as Vocabulary
from tokenizers import processors

from afserve.server.app import build_app
from afserve.server.http.settings import ServerSettings
from afserve.tokens.tokenizer import Tokenizer


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_whole(client, server):
    done = client.completions.create(model="tiny", prompt="hello", max_tokens=32)
    assert done.choices[0].text == server.backend.reply
    assert done.choices[0].finish_reason == "stop"
    assert done.usage.prompt_tokens == len(server.backend.requests[0].prompt_ids)
    assert done.usage.prompt_tokens_details.cached_tokens == 2
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens


def test_stream_is_the_same_text(client, server):
    stream = client.completions.create(
        model="tiny", prompt="hello", max_tokens=32, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == server.backend.reply
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0


def test_text_is_sent_as_it_is(http, server):
    server.backend.reply = "日本語 😀 naïve"
    for stream in (False, True):
        reply = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 99, "stream": stream})
        assert "\\u" not in reply.text and "語" in reply.text and "😀" in reply.text


def test_default_is_sixteen_tokens(client, server):
    server.backend.eos = False
    done = client.completions.create(model="tiny", prompt="hello")
    assert done.usage.completion_tokens == 16 and done.choices[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"], [5, 6, 7], [[5, 6], [7, 8, 9]]])
def test_prompt_forms(client, server, prompt):
    done = client.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=3)
    count = 2 * (len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1)
    assert [choice.index for choice in done.choices] == list(range(count))
    assert len(server.backend.requests) == count


def test_n_counts_seeds_up(client, server):
    client.completions.create(model="tiny", prompt="x", n=3, seed=7, max_tokens=2)
    assert sorted(r.params.seed for r in server.backend.requests) == [7, 8, 9]
    assert all(r.params.n == 1 for r in server.backend.requests)


def test_without_a_seed_every_choice_gets_its_own(client, server):
    client.completions.create(model="tiny", prompt=["x", "y"], n=2, max_tokens=2)
    seeds = {r.params.seed for r in server.backend.requests}
    assert len(seeds) == 4 and all(0 <= seed < 1 << 63 for seed in seeds)


def test_n_streams_every_choice(client, server):
    texts = ["", "", ""]
    for chunk in client.completions.create(model="tiny", prompt="x", n=3, max_tokens=32, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [server.backend.reply] * 3


def test_stop_string_ends_the_engine_request(client, server):
    server.backend.eos = False
    done = client.completions.create(model="tiny", prompt="x", max_tokens=100, stop=["brown", "zzz"])
    assert done.choices[0].text == " the quick "
    assert done.choices[0].finish_reason == "stop"
    assert done.usage.completion_tokens < 100
    assert server.backend.ended.wait(10)
    assert server.backend.closed == server.backend.requests[:1]


def test_min_tokens_holds_back_stop_strings(client, server):
    server.backend.eos = False
    count = len(server.backend.tokenizer.encode(server.backend.reply))
    done = client.completions.create(
        model="tiny", prompt="x", max_tokens=100, stop="quick", extra_body={"min_tokens": count + 1}
    )
    assert done.choices[0].text == server.backend.reply + " the "


def test_extra_sampling_fields_reach_the_engine(http, server):
    body = {
        "model": "tiny", "prompt": "x", "max_tokens": 4, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
        "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [3], "temperature": 0, "logit_bias": {"7": -3},
        "some_future_field": {"x": 1}, "user": "me",
    }  # fmt: skip
    assert http.post("/v1/completions", json=body).status_code == 200
    params = server.backend.requests[0].params
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (5, 0.1, 1.1, 2)
    assert (
        params.ignore_eos
        and params.greedy
        and params.stop_token_ids == (3,)
        and params.logit_bias == ((7, -3.0),)
    )


def test_echo_with_prompt_logprobs_as_lm_eval_asks(http, server):
    ids = server.backend.tokenizer.encode("the lazy dog")
    body = {"model": "tiny", "prompt": [ids], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(ids) + 1 == len(logprobs["top_logprobs"])
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert choice["text"].startswith("the lazy dog")
    assert all(
        text == choice["text"][at : at + len(text)]
        for text, at in zip(logprobs["tokens"], logprobs["text_offset"])
    )
    body["max_tokens"] = 0
    only = http.post("/v1/completions", json=body).json()["choices"][0]
    assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 0
    assert only["text"] == "the lazy dog" and len(only["logprobs"]["tokens"]) == len(ids)


def test_logprobs_stream_offsets_go_on(http, server):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 8, "logprobs": 2, "echo": True}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    offsets: list[int] = []
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = httpx.Response(200, content=line[6:]).json()
                offsets += chunk["choices"][0]["logprobs"]["text_offset"]
    assert offsets == whole["text_offset"]


def test_offsets_point_into_the_text(http):
    """Also after characters that several tokens share, and after special tokens that the text does not show."""
    prompt = "naïve 😀 日本語 x"
    for given in (prompt, prompt + "<|user|>y"):
        body = {"prompt": given, "max_tokens": 30, "logprobs": 0, "echo": True}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        shown = [(t, at) for t, at in zip(tokens, offsets) if not t.startswith("bytes:") and t != "<|end|>"]
        assert all(choice["text"][at : at + len(t)] == t for t, at in shown)
        assert choice["text"].startswith(given)


def test_a_begin_token_takes_no_room_in_the_text(make_backend, checkpoint):
    vocabulary = Vocabulary.from_file(str(checkpoint / "tokenizer.json"))
    vocabulary.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    app = build_app([(make_backend(), Tokenizer(vocabulary))], ServerSettings())

    async def ask(prompt: object) -> dict:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
            body = {"prompt": prompt, "max_tokens": 2, "logprobs": 0, "echo": True}
            return (await http.post("/v1/completions", json=body)).json()["choices"][0]

    plain = asyncio.run(ask("the fox"))
    assert plain["text"].startswith("the fox") and plain["logprobs"]["tokens"][0] == "<s>"
    assert plain["logprobs"]["text_offset"][:2] == [0, 0]
    by_ids = asyncio.run(ask([0, *vocabulary.encode("the fox", add_special_tokens=False).ids]))
    assert by_ids["text"].startswith("<s>the fox") and by_ids["logprobs"]["text_offset"][:2] == [0, 3]
