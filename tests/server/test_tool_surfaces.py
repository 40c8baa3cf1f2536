"""One answer with calls through every API, streamed and not: the same names, arguments, words and end everywhere."""

import json

import pytest

from tests.server.rendered import strict_json
from tests.server.test_other_apis import http  # noqa: F401 - a fixture
from tests.server.test_tools import TOOLS, USER, roomy, server  # noqa: F401 - fixtures

CALL = '<tool_call>\n{"name": "time", "arguments": %s}\n</tool_call>'
FENCE = "Here:\n```python\nprint(1)\n```\n"
MENTION = 'Use <tool_call> to call. e.g. {"a": 1} fine'
BEHIND = "\nClose it with </tool_call>\nok"
OPEN = '<tool_call>\n{"name": "time", "arguments": {"a": [1, {"b": "x'
REPLIES = [
    (CALL % "null", "", [{}]),
    (FENCE + CALL % '{"n": NaN, "b": True}' + BEHIND, FENCE + BEHIND, [{"n": "NaN", "b": True}]),
    (MENTION, MENTION, []),
    (CALL.replace("time", "nobody") % "{}", CALL.replace("time", "nobody") % "{}", []),
    (CALL % '{"n": 1e999, "m": 9007199254740993}', "", [{"n": 1e999, "m": 9007199254740993}]),
    (CALL % '{"a": "</tool_call>"}', "", [{"a": "</tool_call>"}]),
    (OPEN, "", [{"a": [1, {"b": "x"}]}]),
]


def asked(path, **more):
    functions = [t["function"] for t in TOOLS]
    if path == "/v1/messages":
        tools = [
            {"name": f["name"], "input_schema": f.get("parameters", {"type": "object"})} for f in functions
        ]
        return {"model": "tiny", "max_tokens": 400, "messages": USER, "tools": tools, **more}
    if path == "/v1/responses":
        return {
            "model": "tiny",
            "input": "hello",
            "tools": [{"type": "function", **f} for f in functions],
            **more,
        }
    return {"model": "tiny", "messages": USER, "tools": TOOLS, "stream": False, **more}


def chat(body):
    message = body["choices"][0]["message"]
    calls = [strict_json(c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    return message["content"] or "", calls


def streamed_chat(reply):
    said = [line for line in reply.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in said]
    calls = {}
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            calls[call["index"]] = calls.get(call["index"], "") + call["function"].get("arguments", "")
    return "".join(d.get("content") or "" for d in deltas), [strict_json(text) for text in calls.values()]


def message(body):
    calls = [block["input"] for block in body["content"] if block["type"] == "tool_use"]
    return "".join(block.get("text", "") for block in body["content"]), calls


def response(body):
    calls = [strict_json(item["arguments"]) for item in body["output"] if item["type"] == "function_call"]
    texts = [part["text"] for item in body["output"] for part in item.get("content", [])]
    return "".join(texts), calls


def ollama(body):
    calls = [call["function"]["arguments"] for call in body["message"].get("tool_calls", [])]
    return body["message"]["content"], calls


@pytest.mark.parametrize(("reply", "said", "calls"), REPLIES)
def test_every_api_reads_the_same(http, server, reply, said, calls):  # noqa: F811
    server.backend.reply = reply
    path = "/v1/chat/completions"
    body = http.post(path, json=asked(path)).json()
    assert chat(body) == (said, calls)
    assert body["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")
    assert streamed_chat(http.post(path, json=asked(path, stream=True))) == (said, calls)
    assert response(http.post("/v1/responses", json=asked("/v1/responses")).json()) == (said, calls)
    finite = [{k: "1e999" if v == 1e999 else v for k, v in call.items()} for call in calls]
    for path, told in (("/v1/messages", message), ("/api/chat", ollama)):
        text = http.post(path, json=asked(path)).text
        assert told(strict_json(text)) == (said, finite)


@pytest.mark.slow
def test_a_call_that_is_cut_by_its_limit_stays_open(http, server):  # noqa: F811
    server.backend.reply = CALL % '{"command": "rm -rf build"}'
    path = "/v1/chat/completions"
    whole = len(server.backend.tokenizer.encode(server.backend.reply, add_special_tokens=False))
    for limit in range(1, whole):
        choice = http.post(path, json=asked(path, max_tokens=limit)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls", []):
            text = call["function"]["arguments"]
            assert text == '{"command": "rm -rf build"}' or not is_json(text)


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
