"""OpenAI's own client, an answer in a JSON schema: python examples/openai_client.py [URL] (pip install openai)"""

import json
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
schema = {
    "type": "object",
    "properties": {"even": {"type": "boolean"}},
    "required": ["even"],
    "additionalProperties": False,
}

with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Is 4 even?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "even", "schema": schema}},
        max_tokens=64,
        temperature=0,
    )
    print(json.loads(answer.choices[0].message.content or ""))
