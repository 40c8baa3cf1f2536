"""The chat endpoint over a real socket."""

import openai
import pytest


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_text(server) -> str:
    return server.backend.tokenizer.decode(server.backend.requests[0].prompt_ids, skip_special_tokens=False)


@pytest.mark.slow
def test_whole(client, server):
    done = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    assert done.choices[0].message.content == server.backend.reply
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].finish_reason == "stop"
    assert prompt_text(server) == "<|user|>hello<|end|><|assistant|>"


def test_stream_begins_with_the_role(client, server):
    messages = [{"role": "user", "content": "hello"}]
    chunks = list(client.chat.completions.create(model="tiny", messages=messages, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == server.backend.reply
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1


def test_content_in_parts(client, server):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}])
    assert prompt_text(server).startswith("<|user|>hello<|end|>")


def test_room_left_is_the_default_length(client, server):
    server.backend.eos = False
    done = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    assert done.usage.total_tokens == server.backend.model.max_model_len
    assert done.choices[0].finish_reason == "length"


def test_max_completion_tokens_comes_first(client, server):
    server.backend.eos = False
    messages = [{"role": "user", "content": "hello"}]
    done = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=5, max_tokens=9
    )
    assert done.usage.completion_tokens == 5


def test_logprobs(client, server):
    messages = [{"role": "user", "content": "hello"}]
    done = client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=2)
    content = done.choices[0].logprobs.content
    assert len(content) == done.usage.completion_tokens
    assert all(
        len(entry.top_logprobs) == 2 and bytes(entry.bytes).decode() == entry.token for entry in content
    )
    assert "".join(e.token for e in content[:-1]) == server.backend.reply


def test_tools_are_shown_to_the_model_only(client, server):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    client.chat.completions.create(model="tiny", messages=messages, tools=[tool], tool_choice="auto")
    assert '"name": "f"' in prompt_text(server)


def test_template_refusal_is_a_400(client):
    with pytest.raises(openai.BadRequestError, match="unknown role alien"):
        client.chat.completions.create(model="tiny", messages=[{"role": "alien", "content": "x"}])


def test_continuous_usage(client, server):
    messages = [{"role": "user", "content": "hello"}]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(model="tiny", messages=messages, stream=True, stream_options=options)
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1
