"""Requests of every kind beside a soak's streams: schemas, tools, long prompts, several answers, batches, other APIs.

What each is answered is checked for its form; texts are the streams' business. It knows HTTP and no cluster.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx
import jsonschema

LANES = 3
BATCH_SECONDS = 150.0
_AGES = {"type": "array", "items": {"type": "integer"}, "maxItems": 3}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ages": _AGES},
    "required": ["name"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
ASKED = [{"role": "user", "content": "What does os.path.join do?"}]
LONG = "import os\nimport sys\nfrom pathlib import Path\n" * 40
Client = httpx.AsyncClient
Kind = Callable[[Client, random.Random], Awaitable[str]]


async def _post(client: Client, path: str, body: object) -> httpx.Response:
    return await client.post(path, json=body)


def _said(reply: httpx.Response) -> str:
    """Empty where it is as it should be; a server without room is no fault."""
    return "" if reply.status_code in (200, 429) else f"{reply.status_code} {reply.text[:160]}"


async def _schema(client: Client, draw: random.Random) -> str:
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    body = {"messages": ASKED, "max_tokens": 120, "response_format": shape, "seed": draw.randrange(99)}
    reply = await _post(client, "/v1/chat/completions", body)
    if reply.status_code != 200:
        return _said(reply)
    choice = reply.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    return ""


async def _tools(client: Client, draw: random.Random) -> str:
    body = {"messages": ASKED, "max_tokens": 160, "tools": [TOOL], "tool_choice": "required"}
    reply = await _post(client, "/v1/chat/completions", {**body, "seed": draw.randrange(99)})
    if reply.status_code != 200:
        return _said(reply)
    choice = reply.json()["choices"][0]
    if choice["finish_reason"] == "tool_calls":
        for call in choice["message"]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    return ""


async def _long(client: Client, draw: random.Random) -> str:
    prompt = f"# {draw.randrange(1000)}\n{LONG}"
    return _said(await _post(client, "/v1/completions", {"prompt": prompt, "max_tokens": 8}))


async def _several(client: Client, draw: random.Random) -> str:
    body = {"prompt": "x = [", "n": 3, "logprobs": 2, "max_tokens": 24, "seed": draw.randrange(99)}
    return _said(await _post(client, "/v1/completions", body))


async def _surface(client: Client, draw: random.Random) -> str:
    words = "What does json.dumps do?"
    path, body = draw.choice(
        (
            ("/v1/responses", {"input": words, "max_output_tokens": 24}),
            ("/v1/messages", {"messages": [{"role": "user", "content": words}], "max_tokens": 24}),
            ("/api/chat", {"messages": [{"role": "user", "content": words}], "stream": False}),
            ("/v1/embeddings", {"input": [words, "another"]}),
        )
    )
    return _said(await _post(client, path, {"model": "nano", **body}))


async def _gone(client: Client, draw: random.Random) -> str:
    body = {"prompt": "def f(", "max_tokens": 200, "stream": True, "n": draw.choice((1, 4))}
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        async for _ in reply.aiter_lines():
            return ""
    return ""


async def _refused(client: Client, draw: random.Random) -> str:
    body: object = draw.choice(
        ({"prompt": "x", "max_tokens": -1}, {"prompt": "x", "structured_outputs": {"regex": "("}}, [])
    )
    reply = await _post(client, "/v1/completions", body)  # fmt: skip
    return "" if reply.status_code == 400 else f"{reply.status_code} where 400 is due: {reply.text[:160]}"


async def _batch(client: Client, draw: random.Random) -> str:
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"prompt": "try:", "max_tokens": 8}}
        for n in range(draw.randint(1, 6))
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    sent = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("b.jsonl", text)})
    if sent.status_code != 200:
        return _said(sent)
    body = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    begun = await _post(client, "/v1/batches", body)
    until = time.monotonic() + BATCH_SECONDS
    while begun.status_code == 200 and time.monotonic() < until:
        told = (await client.get(f"/v1/batches/{begun.json()['id']}")).json()
        if told.get("status") == "completed":
            failed = told["request_counts"]["failed"]
            return f"{failed} lines of a batch failed" if failed else ""
        await asyncio.sleep(0.5)
    return _said(begun) or f"a batch was not completed within {BATCH_SECONDS:.0f} s"


KINDS: dict[str, Kind] = {
    "schema": _schema, "tools": _tools, "long prompt": _long, "several answers": _several, "other API": _surface,
    "client gone": _gone, "refused": _refused, "batch": _batch,
}  # fmt: skip


async def ask_mixed(
    client: Client, seconds: float, seed: int, done: Counter[str], wrong: Counter[str]
) -> None:
    """One request after another in each lane; `done` counts kinds, `wrong` what was not as it should be."""
    until = time.monotonic() + seconds

    async def lane(number: int) -> None:
        draw = random.Random(seed * LANES + number)
        while time.monotonic() < until:
            kind = draw.choice(sorted(KINDS))
            try:
                said = await KINDS[kind](client, draw)
            except (httpx.HTTPError, ValueError, KeyError, jsonschema.ValidationError) as error:
                said = f"{type(error).__name__}: {str(error)[:160]}"
            done[kind] += 1
            if said:
                wrong[f"{kind}: {said}"] += 1
            await asyncio.sleep(draw.uniform(0.0, 0.5))

    await asyncio.gather(*map(lane, range(LANES)))
