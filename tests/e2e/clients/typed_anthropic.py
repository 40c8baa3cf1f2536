"""Anthropic's SDK for Python by its types (mypy --strict): ours is sent, answers are validated strictly."""

import sys

from anthropic import Anthropic
from anthropic.types import Message, MessageParam, MessageTokensCount, TextBlockParam, ToolParam

client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=60)
system: list[TextBlockParam] = [
    {"type": "text", "text": "You look. " * 40, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
]
said: list[MessageParam] = [{"role": "user", "content": "What is in the first drawer?"}]
schema: dict[str, object] = {"type": "object", "properties": {"drawer": {"type": "integer"}}}
tools: list[ToolParam] = [
    {"name": "look", "input_schema": schema},
    {"name": "seek", "input_schema": schema, "defer_loading": True},
]
ours = {
    "retain": 900,
    "priority": 1,
    "cache_salt": "s",
    "deadline": 60.0,
    "ttft": 60.0,
    "tpot": 60.0,
    "draft": "off",
}

asked = client.messages.with_raw_response.create(
    model="nano", max_tokens=200, system=system, messages=said, tools=tools, extra_body=ours
)
message = Message.model_validate_json(asked.text(), strict=True)
assert [block.name for block in message.content if block.type == "tool_use"] == ["look"]
assert message.usage.cache_creation_input_tokens and message.usage.cache_read_input_tokens is not None
with client.messages.stream(
    model="nano", max_tokens=200, system=system, messages=said, tools=tools, extra_body=ours
) as stream:
    last = stream.get_final_message()
assert last.stop_reason == "tool_use" and last.usage.output_tokens
referred: list[MessageParam] = [
    *said,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "seek"}]}
    ]},
]  # fmt: skip
counts = [
    MessageTokensCount.model_validate_json(
        client.messages.with_raw_response.count_tokens(model="nano", messages=given, tools=tools).text(),
        strict=True,
    ).input_tokens
    for given in (said, referred)
]
assert counts[0] < counts[1]
