"""What a client says about caching: marks, retention, and prompts that are warmed, by each API's own words."""

from dataclasses import replace

import httpx
import pytest

from afserve import Client
from afserve.errors import RequestError

MARK = {"type": "ephemeral"}


def block(words, **mark):
    return {"type": "text", "text": words, **({"cache_control": mark} if mark else {})}


def message(**more):
    return {"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], **more}


def retained(server):
    return server.backend.requests[-1].retain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "seconds"),
    [
        ({}, 0),
        ({"system": [block("Be short.", **MARK)]}, 300),
        ({"system": [block("Be short.", **MARK, ttl="1h"), block("Now.", **MARK, ttl="5m")]}, 3600),
        ({"cache_control": {**MARK, "ttl": "1h"}}, 3600),
        ({"messages": [{"role": "user", "content": [block("Hi", **MARK)]}]}, 300),
        ({"cache_control": MARK, "retain": 7}, 300),
        ({"cache_control": MARK, "retain": 400}, 400),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}, "cache_control": MARK}]}, 300),
    ],
)
def test_a_mark_keeps_the_prompt(http, server, more, seconds):
    said = http.post("/v1/messages", json=message(**more))
    assert said.status_code == 200, said.text
    usage = said.json()["usage"]
    assert retained(server) == seconds
    assert (usage["cache_creation_input_tokens"] > 0) is (seconds > 0) and (usage["input_tokens"] > 0) is (
        seconds == 0
    )
    counted = http.post("/v1/messages/count_tokens", json=message(**more)).json()["input_tokens"]
    assert counted == sum(count for kind, count in usage.items() if kind != "output_tokens")


def test_what_fills_no_block_was_not_kept(make_backend, run_server):
    backend = make_backend()
    backend.model = replace(backend.model, block_size=16)
    with run_server(backend) as one, httpx.Client(base_url=one.url) as http:
        usage = http.post("/v1/messages", json=message(cache_control=MARK, system="a few words" * 5)).json()[
            "usage"
        ]
    length = len(backend.requests[-1].prompt_ids)
    assert length % 16 and usage["cache_read_input_tokens"] == 2
    assert usage["cache_creation_input_tokens"] == length // 16 * 16 - 2 > 0
    assert usage["input_tokens"] == length % 16


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"system": [block("x", **MARK)] * 5},
            "system[4].cache_control: is the 5th mark of the request, at most 4",
        ),
        ({"system": [block("x", type="permanent")]}, "system[0].cache_control: {'type': 'permanent'} is not"),
        ({"cache_control": {**MARK, "ttl": "2h"}}, "cache_control.ttl: '2h' is none of 5m, 1h"),
        ({"cache_control": {**MARK, "ttl": 5}}, "cache_control.ttl: 5 is none"),
        ({"cache_control": {**MARK, "ttl": ""}}, "cache_control.ttl: '' is none"),
        ({"cache_control": MARK, "retain": "x"}, "retain: is a string"),
        ({"cache_control": [1]}, "cache_control: [1] is not"),
    ],
)
def test_a_wrong_mark_is_refused_by_its_place(http, more, words):
    said = http.post("/v1/messages", json=message(**more))
    assert said.status_code == 400 and words in said.json()["error"]["message"], said.text


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/api/generate", "/api/chat"]
)
@pytest.mark.parametrize(
    ("more", "seconds"),
    [
        ({"prompt_cache_retention": "24h", "prompt_cache_key": "a"}, 86_400),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_retention": None}, 0),
        ({"retain": 7.5, "prompt_cache_retention": "24h"}, 7.5),
    ],
)
def test_openais_words_and_ours(http, server, path, more, seconds):
    words = {"/v1/responses": "input", "/v1/completions": "prompt", "/api/generate": "prompt"}
    body = {words[path]: "hi"} if path in words else {"messages": [{"role": "user", "content": "hi"}]}
    said = http.post(path, json={**body, "model": "tiny", **more})
    assert said.status_code == 200 and retained(server) == seconds, said.text


@pytest.mark.parametrize(
    ("hints", "seconds", "priority"),
    [
        (
            {"agent_hints": {"priority": 5, "osl": 64}, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            3600,
            -5,
        ),
        ({"cache_control": {"type": "ephemeral"}}, 300, 0),
        ({"cache_control": {"type": "ephemeral", "ttl": 90}, "annotations": ["x"]}, 90, 0),
        ({}, 0, 0),
    ],
)
def test_dynamos_words(http, server, hints, seconds, priority):
    said = http.post("/v1/completions", json={"prompt": "hi", "nvext": hints})
    assert said.status_code == 200, said.text
    request = server.backend.requests[-1]
    assert (request.retain, request.priority) == (seconds, priority)
    ours = {"prompt": "hi", "nvext": hints, "retain": 7, "priority": 3}
    assert http.post("/v1/completions", json=ours).status_code == 200
    request = server.backend.requests[-1]
    assert (request.retain, request.priority) == (7, 3), "our own words go before"


@pytest.mark.parametrize(
    ("hints", "param"),
    [
        ({"agent_hints": {"priority": "high"}}, "nvext.agent_hints.priority"),
        ({"agent_hints": {"speculative_prefill": 1}}, "nvext.agent_hints.speculative_prefill"),
        ({"cache_control": {"type": "permanent"}}, "nvext.cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "soon"}}, "nvext.cache_control.ttl"),
        ([], "nvext"),
    ],
)
def test_what_is_no_hint_is_refused_by_name(http, hints, param):
    said = http.post("/v1/completions", json={"prompt": "hi", "nvext": hints})
    assert said.status_code == 400 and said.json()["error"]["param"] == param, said.text


@pytest.mark.parametrize(
    ("more", "param"),
    [({"retain": -1}, "retain"), ({"retain": 86_401}, "retain"), ({"retain": "5m"}, "retain"),
     ({"prompt_cache_retention": "1h"}, "prompt_cache_retention")],
)  # fmt: skip
def test_what_is_no_retention_is_refused_by_name(http, more, param):
    said = http.post("/v1/completions", json={"prompt": "hi", **more})
    assert said.status_code == 400 and said.json()["error"]["param"] == param, said.text
    said = http.post("/api/generate", json={"model": "tiny", "prompt": "hi", **more})
    assert said.status_code == 400 and said.json()["error"].startswith(f"{param}: "), said.text


def test_a_prompt_is_warmed(http, server):
    said = http.post("/v1/cache/warm", json={"prompt": "hello", "retain": 60})
    request = server.backend.requests[-1]
    assert said.status_code == 200, said.text
    assert request.retain == 60 and request.params.max_tokens == 1 and request.params.greedy
    told = said.json()
    assert told["object"] == "cache.warm" and told["retain"] == 60 and told["seconds"] >= 0
    assert told["usage"]["prompt_tokens"] == len(request.prompt_ids)


@pytest.mark.parametrize(("word", "seconds"), [("24h", 86_400), ("in_memory", 0), (None, 300)])
def test_a_warm_prompt_is_kept_as_openais_word_says(http, server, word, seconds):
    said = http.post("/v1/cache/warm", json={"prompt": "hello", "prompt_cache_retention": word})
    assert said.status_code == 200 and said.json()["retain"] == retained(server) == seconds, said.text


def test_a_warm_chat_is_the_beginning_of_the_next(http, server):
    """No answer is begun, and tools stand where they will."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    chat = {"messages": [{"role": "system", "content": "You are an agent."}], "tools": tools}
    assert http.post("/v1/cache/warm", json=chat).status_code == 200
    warm = server.backend.requests[-1]
    chat["messages"].append({"role": "user", "content": "Hi"})
    assert http.post("/v1/chat/completions", json={**chat, "max_tokens": 4}).status_code == 200
    asked = server.backend.requests[-1]
    assert warm.retain == 300 and asked.prompt_ids[: len(warm.prompt_ids)] == warm.prompt_ids


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "prompt"), ({"prompt": ""}, "prompt"), ({"messages": []}, "messages"), ({"prompt": ["x"] * 300}, "prompt"),
     ({"prompt": "x", "retain": -1}, "retain"), ({"prompt": "x", "resume": 9}, "resume"),
     ({"prompt": "x", "model": "y"}, "model"),
     ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "prompt"),
     ({"prompt": "x", "tools": []}, "tools"), ({"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs"),
     ({"system": "x", "messages": [{"role": "user", "content": "y"}]}, "system"), ({"input": "x"}, "input")],
)  # fmt: skip
def test_what_cannot_be_warmed_is_refused_by_name(http, body, param):
    said = http.post("/v1/cache/warm", json=body)
    assert said.status_code in (400, 404) and said.json()["error"]["param"] == param, said.text


def test_our_client_warms(server):
    with Client(server.url) as client:
        assert client.warm({"prompt": "hello"})["object"] == "cache.warm"
        with pytest.raises(RequestError, match="retain"):
            client.warm({"prompt": "hello", "retain": -1})
