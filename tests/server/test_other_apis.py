"""Anthropic's and Ollama's words for the same request: raw, and through their own clients where these are installed."""

import json
from contextlib import closing

import pytest

from afserve.errors import PeerLost
from tests.server.test_tools import CALLS, TOOLS, roomy, server  # noqa: F401 - fixtures

USER = [{"role": "user", "content": "hello"}]
MESSAGE = {"model": "tiny", "max_tokens": 400, "messages": USER}
ANTHROPIC_TOOLS = [
    {"name": t["function"]["name"], "input_schema": t["function"].get("parameters", {"type": "object"})}
    for t in TOOLS
]


@pytest.fixture
def http(server):  # noqa: F811
    import httpx

    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def prompt_text(server):  # noqa: F811
    ids = server.backend.requests[-1].prompt_ids
    return server.backend.tokenizer.decode(ids, skip_special_tokens=False)


def events(reply):
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


def lines(reply):
    return [json.loads(line) for line in reply.text.splitlines()]


@pytest.mark.slow
def test_a_message(http, server):  # noqa: F811
    blocks = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    asked = {**MESSAGE, "system": "be short", "messages": [{"role": "user", "content": blocks}]}
    said = http.post("/v1/messages", json=asked).json()
    assert said["type"] == "message" and said["role"] == "assistant" and said["stop_reason"] == "end_turn"
    assert said["content"] == [{"type": "text", "text": server.backend.reply}]
    assert said["usage"]["output_tokens"] == 8
    assert prompt_text(server) == "<|system|>be short<|end|><|user|>hello<|end|><|assistant|>"


def test_a_message_that_calls(http, server):  # noqa: F811
    server.backend.reply = CALLS
    said = http.post("/v1/messages", json={**MESSAGE, "tools": ANTHROPIC_TOOLS}).json()
    assert said["stop_reason"] == "tool_use"
    assert [b["type"] for b in said["content"]] == ["text", "tool_use", "tool_use"]
    assert said["content"][1]["input"] == {"city": "Bern", "days": 2}
    streamed = events(http.post("/v1/messages", json={**MESSAGE, "tools": ANTHROPIC_TOOLS, "stream": True}))
    assert streamed[0]["type"] == "message_start" and streamed[-1]["type"] == "message_stop"
    parts = [
        e["delta"]["partial_json"] for e in streamed if e.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert len(parts) > 4 and "".join(parts).startswith('{"city": "Bern", "days": 2}')
    results = [
        {"type": "tool_result", "tool_use_id": b["id"], "content": "sun"}
        for b in said["content"]
        if b["type"] == "tool_use"
    ]
    history = [*USER, {"role": "assistant", "content": said["content"]}, {"role": "user", "content": results}]
    assert http.post("/v1/messages", json={**MESSAGE, "messages": history}).status_code == 200
    assert prompt_text(server).endswith("<|tool|>sun<|end|><|tool|>sun<|end|><|assistant|>")


def test_a_message_says_which_of_its_stop_sequences_ended_it(http, server):  # noqa: F811
    asked = {**MESSAGE, "stop_sequences": ["zzz", server.backend.reply[4:9]]}
    said = http.post("/v1/messages", json=asked).json()
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", server.backend.reply[4:9])
    delta = events(http.post("/v1/messages", json={**asked, "stream": True}))[-2]["delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": server.backend.reply[4:9]}


def test_what_a_tool_of_a_message_says_of_itself_counts(http, server):  # noqa: F811
    strict = {**ANTHROPIC_TOOLS[0], "strict": True, "allowed_callers": ["direct"], "defer_loading": False}
    http.post("/v1/messages", json={**MESSAGE, "tools": [strict]})
    assert server.backend.requests[-1].params.grammar
    failed = {"type": "tool_result", "tool_use_id": "a", "content": "no network", "is_error": True}
    http.post("/v1/messages", json={**MESSAGE, "messages": [*USER, {"role": "user", "content": [failed]}]})
    assert "<|tool|>Error: no network<|end|>" in prompt_text(server)


def test_a_deferred_tool_is_told_where_a_result_refers_to_it(http, server):  # noqa: F811
    """What was said before stays as it was, so that a cache finds it."""
    tools = [
        ANTHROPIC_TOOLS[0],
        *({**ANTHROPIC_TOOLS[0], "name": name, "defer_loading": True} for name in "ab"),
    ]
    asked = {**MESSAGE, "tools": tools[:2]}
    first = http.post("/v1/messages", json=asked)
    assert first.status_code == 200 and "x-afserve-ignored" not in first.headers
    before = prompt_text(server)
    found = [{"type": "text", "text": "one:"}, {"type": "tool_reference", "tool_name": "b"}]
    turns = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "s", "name": "forecast", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "s", "content": found}]},
    ]
    asked = {**asked, "tools": tools, "messages": [*USER, *turns]}
    http.post("/v1/messages", json=asked)
    prompt = prompt_text(server)
    assert prompt.startswith(before) and '"name": "a"' not in prompt
    assert 'one:<functions>\n<function>{"name": "b", "parameters": {' in prompt.removeprefix(before)
    chosen = {**asked, "tool_choice": {"type": "tool", "name": "b"}}
    assert http.post("/v1/messages", json=chosen).status_code == 200
    refused = http.post("/v1/messages", json={**asked, "tool_choice": {"type": "tool", "name": "a"}})
    assert refused.status_code == 400 and "'a' is none of the tools" in refused.text


def test_thinking_that_a_model_lacks_is_off_already(http):
    assert http.post("/v1/messages", json={**MESSAGE, "thinking": {"type": "disabled"}}).status_code == 200
    assert http.post("/api/chat", json={"model": "tiny", "messages": USER, "think": False}).status_code == 200


def test_tokens_of_a_message(http, server):  # noqa: F811
    count = http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": USER}).json()
    assert count == {
        "input_tokens": http.post("/v1/messages", json=MESSAGE).json()["usage"]["input_tokens"] + 2
    }
    assert len(server.backend.requests) == 1


@pytest.mark.parametrize(
    "words, given",
    [
        ("max_tokens: is null", {"max_tokens": None}),
        ("input length and `max_tokens` exceed context limit: 5 + 5000 > 2048, ", {"max_tokens": 5000}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        *(
            (
                words,
                {
                    "messages": [
                        *USER,
                        {"role": "user", "content": [{"type": "tool_result", "content": [part]}]},
                    ]
                },
            )
            for words, part in [
                ("messages[1].content[0].content[0].type", {"type": "image"}),
                ("messages[1].content[0].content[0].tool_name", {"type": "tool_reference", "tool_name": "x"}),
            ]
        ),
        ("tools: all have defer_loading", {"tools": [{**ANTHROPIC_TOOLS[0], "defer_loading": True}]}),
        ("messages[0].role", {"messages": [{"role": "martian", "content": "x"}]}),
        ("thinking.display", {"thinking": {"type": "disabled", "display": "some"}}),
        ("output_config.format.type", {"output_config": {"format": {"type": "regex"}}}),
        ("output_format: is not", {"output_format": {"type": "json_schema"}}),
        ("tools[0].name", {"tools": [{"name": "no name", "input_schema": {}}]}),
        ("tools[0].input_schema", {"tools": [{"name": "a", "input_schema": 5}]}),
        (
            "tools[0].input_schema: a function's arguments are an object",
            {"tools": [{"name": "a", "input_schema": {"type": "array"}}], "tool_choice": {"type": "any"}},
        ),
        (
            "messages[1].content",
            {"messages": [{"role": "user", "content": "x"}, {"role": "user"}], "system": "x"},
        ),
        ("tool_choice.type", {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "some"}}),
        ("stop_sequences", {"stop_sequences": ["x"] * 17}),
    ],
)
def test_a_message_refused(http, words, given):
    reply = http.post("/v1/messages", json={**MESSAGE, **given})
    said = reply.json()
    assert reply.status_code == 400 and said["type"] == "error", said
    assert said["error"]["type"] == "invalid_request_error" and said["error"]["message"].startswith(words), (
        said
    )


def test_an_error_in_a_message_is_an_event(http, server):  # noqa: F811
    server.backend.error, server.backend.fail_at = PeerLost("attention-0", "it died"), 3
    said = events(http.post("/v1/messages", json={**MESSAGE, "stream": True}))[-1]
    assert said["type"] == "error" and said["error"]["type"] == "overloaded_error"


def test_ollama_chat(http, server):  # noqa: F811
    said = lines(http.post("/api/chat", json={"model": "tiny:latest", "messages": USER}))
    assert "".join(line["message"]["content"] for line in said) == server.backend.reply
    assert [line["done"] for line in said] == [False] * (len(said) - 1) + [True]
    assert (
        said[-1]["done_reason"] == "stop" and said[-1]["eval_count"] == 8 and said[-1]["total_duration"] > 0
    )
    options = {"temperature": 0, "num_predict": 3, "num_ctx": 4096, "repeat_penalty": 1.1}
    cut = http.post(
        "/api/chat", json={"model": "tiny", "messages": USER, "stream": False, "options": options}
    ).json()
    assert cut["done_reason"] == "length" and server.backend.requests[-1].params.repetition_penalty == 1.1


def test_ollama_calls_and_formats(http, server):  # noqa: F811
    server.backend.reply = CALLS
    said = lines(http.post("/api/chat", json={"model": "tiny", "messages": USER, "tools": TOOLS}))
    calls = [call["function"] for line in said for call in line["message"].get("tool_calls", ())]
    assert calls == [
        {"name": "forecast", "arguments": {"city": "Bern", "days": 2}},
        {"name": "time", "arguments": {}},
    ]
    http.post("/api/generate", json={"model": "tiny", "prompt": "x", "format": "json", "stream": False})
    http.post("/api/generate", json={"model": "tiny", "prompt": "x", "format": {"type": "integer"}})
    assert all(request.params.grammar for request in server.backend.requests[-2:])


def test_ollama_generate(http, server):  # noqa: F811
    said = lines(http.post("/api/generate", json={"model": "tiny", "prompt": "hello", "system": "be short"}))
    assert "".join(line["response"] for line in said) == server.backend.reply
    assert prompt_text(server) == "<|system|>be short<|end|><|user|>hello<|end|><|assistant|>"
    assert [m["name"] for m in http.get("/api/tags").json()["models"]] == ["tiny"]


@pytest.mark.parametrize(
    "words, given",
    [
        ("options.temperature", {"options": {"temperature": 9}}),
        ("logprobs: is not", {"logprobs": True}),
        ("format: not valid", {"format": "xml"}),
        ("options.seed: is", {"options": {"seed": "x"}}),
        ("options.repeat_penalty: -1 is", {"options": {"repeat_penalty": -1}}),
        ("top_logprobs: is not", {"top_logprobs": 0}),
        ("steps: is not", {"steps": 4}),
        ("messages[0].images", {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}),
        ("model: 'other' is not served", {"model": "other"}),
    ],
)
def test_ollama_refused(http, words, given):
    reply = http.post("/api/chat", json={"model": "tiny", "messages": USER, **given})
    assert reply.status_code in (400, 404) and reply.json()["error"].startswith(words), reply.json()


def test_load(http):
    assert http.get("/load").json() == {"server_load": 0, "models": {"tiny": 0}}


def test_anthropic_client(server):  # noqa: F811
    anthropic = pytest.importorskip("anthropic")
    server.backend.reply = CALLS
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        with client.messages.stream(**MESSAGE, tools=ANTHROPIC_TOOLS) as stream:
            final = stream.get_final_message()
        assert final.stop_reason == "tool_use" and final.content[1].input == {"city": "Bern", "days": 2}
        assert client.messages.count_tokens(model="tiny", messages=USER).input_tokens > 0
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**MESSAGE, "model": "other"})


def test_ollama_client(server):  # noqa: F811
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    with closing(client._client):
        ask_ollama(ollama, client, server)


def ask_ollama(ollama, client, server):  # noqa: F811
    assert client.chat(model="tiny", messages=USER).message.content == server.backend.reply
    assert "".join(part.response for part in client.generate(model="tiny", prompt="x", stream=True)) == (
        server.backend.reply
    )
    assert client.list().models[0].model == "tiny"
    with pytest.raises(ollama.ResponseError, match="not served"):
        client.chat(model="other", messages=USER)
