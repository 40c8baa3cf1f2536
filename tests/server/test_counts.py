"""Counts come before work on every surface: a list that is too long is refused for its length, not for its items."""

import pytest

USER = [{"role": "user", "content": "hello"}]
WRONG = {"role": 5, "type": 7, "content": 9, "name": 11}  # refused by whoever looks at it
MANY = [WRONG] * 10_000
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PARTS = [{"role": "user", "content": MANY}]
WIDE = {"type": "object", "properties": {f"p{i}": {"type": 5} for i in range(20_000)}}
LONG = {"enum": [0] * 20_000}
TOOL = {"type": "function", "function": {"name": "f", "parameters": WIDE}}
CLAUDES = {"name": "f", "input_schema": WIDE}
FORM = {"type": "json_schema", "json_schema": {"schema": WIDE}}
CASES = [
    (CHAT, "messages", {"messages": MANY}),
    (CHAT, "messages[0].content", {"messages": PARTS}),
    (CHAT, "messages[0].tool_calls", {"messages": [{"role": "assistant", "tool_calls": MANY}]}),
    (CHAT, "tools", {"messages": USER, "tools": MANY}),
    (CHAT, "tools[0].function.parameters", {"messages": USER, "tools": [TOOL]}),
    (CHAT, "guided_choice", {"messages": USER, "guided_choice": [5] * 10_000}),
    (CHAT, "guided_json", {"messages": USER, "guided_json": WIDE}),
    (CHAT, "response_format.json_schema.schema", {"messages": USER, "response_format": FORM}),
    (CHAT, "structured_outputs.json", {"messages": USER, "structured_outputs": {"json": LONG}}),
    (CHAT, "structured_outputs.choice", {"messages": USER, "structured_outputs": {"choice": [5] * 10_000}}),
    (CHAT, "stop", {"messages": USER, "stop": [5] * 10_000}),
    (CHAT, "stop_token_ids", {"messages": USER, "stop_token_ids": ["x"] * 10_000}),
    (CHAT, "logit_bias", {"messages": USER, "logit_bias": {f"x{i}": "y" for i in range(10_000)}}),
    ("/v1/completions", "n", {"prompt": [{}] * 10_000}),
    ("/v1/completions", "guided_choice", {"prompt": "x", "guided_choice": [5] * 10_000}),
    ("/v1/embeddings", "input", {"input": [{}] * 10_000}),
    ("/tokenize", "messages", {"messages": MANY}),
    ("/detokenize", "tokens", {"tokens": ["x"] * 10_000}),
    (RESPONSES, "input", {"input": MANY}),
    (RESPONSES, "input[0].content", {"input": PARTS}),
    (RESPONSES, "tools", {"input": "x", "tools": MANY}),
    (RESPONSES, "include", {"input": "x", "include": [5] * 10_000}),
    (RESPONSES, "text.format.schema", {"input": "x", "text": {"format": {"type": "json_schema", "schema": LONG}}}),
    (MESSAGES, "messages", {"messages": MANY, "max_tokens": 1}),
    (MESSAGES, "messages[0].content", {"messages": PARTS, "max_tokens": 1}),
    (MESSAGES, "system", {"messages": USER, "max_tokens": 1, "system": MANY}),
    (MESSAGES, "tools", {"messages": USER, "max_tokens": 1, "tools": MANY}),
    (MESSAGES, "tools[0].input_schema", {"messages": USER, "max_tokens": 1, "tools": [CLAUDES]}),
    (MESSAGES, "stop_sequences", {"messages": USER, "max_tokens": 1, "stop_sequences": [5] * 10_000}),
    (f"{MESSAGES}/count_tokens", "messages", {"messages": MANY}),
    (f"{MESSAGES}/count_tokens", "system", {"messages": USER, "system": MANY}),
    ("/api/chat", "messages", {"messages": MANY}),
    ("/api/chat", "tools", {"messages": USER, "tools": MANY}),
    ("/api/chat", "format", {"messages": USER, "format": WIDE}),
    ("/api/chat", "messages[0].tool_calls", {"messages": [{"role": "assistant", "tool_calls": MANY}]}),
    ("/api/generate", "format", {"prompt": "x", "format": WIDE}),
    ("/api/generate", "options.stop", {"prompt": "x", "options": {"stop": [5] * 10_000}}),
]  # fmt: skip


@pytest.mark.parametrize("path, field, body", CASES, ids=[f"{path} {field}" for path, field, _ in CASES])
def test_too_many_are_refused_by_their_number(http, server, path, field, body):
    reply = http.post(path, json={"model": "tiny", **body})
    said = reply.json()["error"]
    message = said if isinstance(said, str) else said["message"]
    assert reply.status_code == 400 and message.startswith(f"{field}: "), message
    assert any(word in message for word in ("entries", "sequences")), message
    assert server.backend.requests == []
