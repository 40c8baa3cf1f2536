"""What one request may be made of, and what nobody may send: each limit refused by name, no route with a 500, no answer
that shows where the server lies, nothing left behind, nothing listening that was not asked for."""

import asyncio
import json
import os
import re
import time
from itertools import islice

import httpx
import psutil
import pytest

from tests.server.malformed import malformed

CHAT = {"messages": [{"role": "user", "content": "x"}]}
DEEP = {"type": "object"}
for _ in range(70):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["x"] * 257}, "n"),
        ("/v1/completions", {"prompt": "x", "n": 129}, "n"),
        ("/v1/completions", {"prompt": ["x"] * 3, "n": 100}, "n"),
        ("/v1/completions", {"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ("/v1/completions", {"prompt": "x", "stop": "a" * 1025}, "stop"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 257}, "max_tokens"),
        ("/v1/completions", {"prompt": [5] * 256}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 100_000}, "prompt"),
        ("/v1/completions", {"prompt": "x", "cache_salt": "a" * 257}, "cache_salt"),
        ("/v1/completions", {"prompt": "x", "deadline": 86_401}, "deadline"),
        ("/v1/completions", {"prompt": "x", "priority": 1 << 21}, "priority"),
        ("/v1/completions", {"prompt": "x", "resume": 301}, "resume"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": CHAT["messages"] * 8193}, "messages"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}] * 1025}, "tools"),
        ("/v1/chat/completions", {**CHAT, "structured_outputs": {"json": DEEP}}, "structured_outputs"),
        ("/v1/chat/completions", {**CHAT, "structured_outputs": {"choice": ["a"] * 4097}}, "structured_outputs"),
        ("/v1/chat/completions", {**CHAT, "guided_regex": "a" * (1 << 18)}, "guided_regex"),
        ("/v1/embeddings", {"input": ["x"] * 257}, "input"),
        ("/v1/batches", {"endpoint": "/v1/completions", "input_file_id": "f", "completion_window": "1h"}, "completion"),
        ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 8193}, "input"),
        ("/detokenize", {"tokens": [5] * 257}, "tokens"),
    ],
)  # fmt: skip
def test_each_limit_of_a_request(http, path, body, param):
    reply = http.post(path, json=body, timeout=60)
    error = reply.json()["error"]
    assert reply.status_code == 400 and (error["param"] or "").startswith(param), error
    assert re.search(r"\d|24h", error["message"]), "it says the limit"


def test_limits_of_a_batch(http):
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}})
    send = {"file": ("a", line), "purpose": (None, "batch")}
    file_id = http.post("/v1/files", files=send).json()["id"]
    ask = {"endpoint": "/v1/completions", "input_file_id": file_id}
    for metadata in ({"a": "b" * 513}, {"a": 5}, {str(i): "x" for i in range(17)}, {"a" * 513: ""}):
        refused = http.post("/v1/batches", json={**ask, "metadata": metadata})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "metadata"
    refused = http.post("/v1/files", files={**send, "file": ("a" * 256, line)})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "file"
    assert http.post("/v1/batches", json={**ask, "metadata": {"a": "b"}}).status_code == 200


# ---- no path, address or traceback


HIDDEN = re.compile(
    r"/(work|home|tmp|usr|proc|etc|root)/|\.py\b|Traceback|0x[0-9a-f]{6}|\b(\d+\.){3}\d+\b|File \""
)


def check(sent, status, text):
    assert status < 500, (sent, status, text)
    if status >= 400 and sent.method != "HEAD":
        asked = sent.path + json.dumps(sent.headers) + sent.body.decode(errors="replace")
        found = HIDDEN.search(text)
        assert found is None or found[0] in asked or "/etc/" in asked, (sent, text)
        assert "error" in text and len(text) < 4000, (sent, text)


async def send_all(server, requests):
    """In parallel, with a time for each that only a hang exceeds."""
    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        turn = asyncio.Semaphore(16)

        async def one(sent):
            async with turn:
                try:
                    reply = await client.request(
                        sent.method, sent.path, headers=sent.headers, content=sent.body
                    )
                except httpx.RemoteProtocolError:
                    return  # closed without an answer: what it sent was no HTTP
                except httpx.TimeoutException as error:
                    raise AssertionError(f"no answer to {sent}") from error
                check(sent, reply.status_code, reply.text)

        await asyncio.gather(*(one(sent) for sent in requests))


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [300, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_malformed_requests_to_every_route(make_backend, run_server, count):
    """Others are served meanwhile, and afterwards nothing is left: no request, no body, no task, no descriptor."""
    backend = make_backend()
    with run_server(backend, admin_keys=("x",)) as server:
        routes = {route.path for route in server.app.routes}
        routes = sorted(routes - {"/admin/down", "/live"})  # one ends the server, the other one never ends
        service, loop = server.app.state.service, server._loop
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=60)
        httpx.post(f"{server.url}/tokenize", json={"prompt": "x" * 9000}, timeout=60)
        asyncio.run(send_all(server, islice(malformed(routes, 1), 50)))  # text processes have started
        before, tasks = descriptors(), len(asyncio.all_tasks(loop))
        asyncio.run(send_all(server, islice(malformed(routes, seed=2), count)))
        until = time.monotonic() + 60
        while (
            len(service.answering)
            or len(service.resumables)
            or len(asyncio.all_tasks(loop)) > tasks + 4
            or descriptors() > before + 2
        ):
            for one in list(service.resumables._kept.values()):
                loop.call_soon_threadsafe(service.resumables.forget_kept, one)
            assert time.monotonic() < until, (
                len(service.answering),
                asyncio.all_tasks(loop),
                descriptors(),
                before,
            )
            time.sleep(0.05)
        assert service.bodies.held_bytes == 0
        assert len(backend.closed) >= len(backend.requests) - len(backend.nodes_kept.answers)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=60).status_code == 200


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_bug_tells_nothing(make_backend, run_server, monkeypatch):
    backend = make_backend()

    async def broken():
        raise RuntimeError("/tmp/secret at 0x7f00 in x.py")

    with run_server(backend) as server:
        monkeypatch.setattr(backend, "view", broken)
        reply = httpx.get(f"{server.url}/status", timeout=60)
        assert reply.status_code == 500 and not HIDDEN.search(reply.text)


# ---- what listens


def listening():
    return {
        tuple(one.laddr)
        for one in psutil.Process().net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }


@pytest.mark.slow
def test_nothing_else_listens(make_backend, run_server):
    before = listening()
    with run_server(make_backend()) as server:
        httpx.get(f"{server.url}/health", timeout=60)
        assert listening() - before == {("127.0.0.1", server.port)}
