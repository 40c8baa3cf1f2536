"""Five turns with a tool by Anthropic's SDK for Python, streamed, its prompt marked to be kept."""

import sys

from anthropic import Anthropic
from look import DESCRIPTION, QUESTION, SCHEMA, SYSTEM, look, show

client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=60)
tools = [{"name": "look", "description": DESCRIPTION, "input_schema": SCHEMA}]
system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
messages = [{"role": "user", "content": QUESTION}]
while True:
    with client.messages.stream(
        model="nano", max_tokens=200, system=system, messages=messages, tools=tools
    ) as stream:
        message = stream.get_final_message()
    messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
    calls = [block for block in message.content if block.type == "tool_use"]
    if not calls:
        break
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": look(**call.input)} for call in calls
    ]
    messages.append({"role": "user", "content": results})
show(message.content[-1].text)
