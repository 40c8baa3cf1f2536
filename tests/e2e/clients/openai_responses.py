"""Five turns with a tool by OpenAI's SDK for Python: responses, each of which follows the one before by its id."""

import json
import sys

from look import DESCRIPTION, QUESTION, SCHEMA, SYSTEM, look, show
from openai import OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=60)
tools = [
    {"type": "function", "name": "look", "description": DESCRIPTION, "parameters": SCHEMA, "strict": False}
]
said, before = [{"role": "user", "content": QUESTION}], None
while True:
    answer = client.responses.create(
        model="nano", instructions=SYSTEM, input=said, tools=tools, previous_response_id=before
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    if not calls:
        break
    said = [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": look(**json.loads(call.arguments)),
        }
        for call in calls
    ]
    before = answer.id
show(answer.output_text)
