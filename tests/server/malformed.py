"""Requests that no client should send, for every route, drawn from a seed."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

PARTS = [
    "a", "-", "..", "%00", "%2e%2e%2f", "%ff", "x" * 300, "file-0", "batch_0", "resp_0", "'", '"', "<b>", "${7*7}",
    "%d8%00", "0" * 64,
]  # fmt: skip
VALUES = [
    None, True, False, 0, -1, 1 << 63, -(1 << 70), 1e308, 1e-320, "", "x", "\ud800", "\x00", [], {}, [[]], [{}],
    {"a": None}, [1, "x", None], {"type": "json_schema"}, {"role": "user", "content": 5}, "null", [[5], "x"],
    {"x" * 40: {"y": [{"z": []}]}}, ["x"] * 40, "../../etc/passwd", "9" * 400,
]  # fmt: skip
FIELDS = [
    "model", "prompt", "messages", "input", "tokens", "max_tokens", "n", "stop", "stream", "logprobs", "seed", "tools",
    "tool_choice", "response_format", "structured_outputs", "logit_bias", "metadata", "endpoint", "input_file_id",
    "completion_window", "previous_response_id", "system", "options", "resume", "request_id", "priority", "nodes",
    "cache_salt", "ttft", "tpot",
    "layers", "attention", "experts", "node", "role", "all", "deadline", "encoding_format", "echo", "guided_regex",
]  # fmt: skip
BODIES = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a":' * 2000, b"[" * 5000, b'{"a":NaN}', b'{"a":1e9999}', b'"x"',
    b'{"prompt":"x","prompt":"y"}', b'{"n":' + b"9" * 5000 + b"}", b"\x00" * 40, b'{"\\ud800":1}', b"--x\r\n\r\n--x--",
]  # fmt: skip
HEADERS = [
    {}, {"authorization": "Bearer x"}, {"authorization": "Basic eDp5"}, {"content-type": "text/plain"},
    {"content-type": "multipart/form-data"}, {"content-type": "multipart/form-data; boundary=x"},
    {"content-type": "application/json; charset=utf-16"}, {"accept": "text/event-stream"}, {"last-event-id": "9" * 99},
    {"origin": "https://evil.example"}, {"host": "evil.example"}, {"x-request-id": "a" * 500}, {"x": "y" * 3000},
    {"transfer-encoding": "chunked"}, {"content-encoding": "gzip"}, {"expect": "100-continue"},
    {"last-event-id": "1.0e"},
]  # fmt: skip
METHODS = ["GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"]


@dataclass(frozen=True)
class Malformed:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def malformed(routes: list[str], seed: int) -> Iterator[Malformed]:
    """For ever, route after route. Nothing of it is a request that should be answered for a minute."""
    dice = random.Random(seed)
    number = 0
    while True:
        route = routes[number % len(routes)]
        number += 1
        path = "".join(
            dice.choice(PARTS) if part.startswith("{") else part for part in _split(route)
        ) + dice.choice(["", "", "", "/", "?a=b", "?limit=-1&after=%00", "//"])
        headers = {"content-type": "application/json", **dice.choice(HEADERS)}
        if dice.random() < 0.3:
            headers.pop("content-type")
        yield Malformed(dice.choice(["GET", "POST", "POST", *METHODS]), path, headers, _body(dice))


def _split(route: str) -> list[str]:
    """Its fixed parts and its {placeholders}."""
    parts = []
    for piece in route.split("{"):
        inside, closed, rest = piece.partition("}")
        parts += ["{" + inside, rest] if closed else [piece]
    return parts


def _body(dice: random.Random) -> bytes:
    if dice.random() < 0.3:
        return dice.choice(BODIES)
    fields = {dice.choice(FIELDS): dice.choice(VALUES) for _ in range(dice.randrange(5))}
    if dice.random() < 0.5:
        fields |= dice.choice(
            [{"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}, {"input": "x"}]
        )
        fields.setdefault("max_tokens", 3)
    return json.dumps(fields).encode()
