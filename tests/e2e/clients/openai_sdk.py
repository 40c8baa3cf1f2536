"""Five turns with a tool by OpenAI's SDK for Python, chats that are streamed and not."""

import json
import sys

from look import DESCRIPTION, QUESTION, SCHEMA, SYSTEM, look, show
from openai import OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=60)
tools = [{"type": "function", "function": {"name": "look", "description": DESCRIPTION, "parameters": SCHEMA}}]
messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
while True:
    with client.chat.completions.stream(model="nano", messages=messages, tools=tools) as stream:
        message = stream.get_final_completion().choices[0].message
    messages.append(message.to_dict(exclude_unset=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = look(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
show(message.content)
