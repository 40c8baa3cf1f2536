"""Many clients, some of which leave at any moment: afterwards nothing is left behind."""

import asyncio
import json
import random
import time

import httpx
import pytest

from tests.open_files import left_open, open_files


async def client(port: int, seed: int) -> str:
    """Asks, reads a random number of times, then stays to the end or leaves without a word."""
    dice = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {"prompt": "x", "max_tokens": 60, "n": dice.choice([1, 3]), "stream": dice.random() < 0.8}
    ).encode()
    whole = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    writer.write(whole[: dice.randrange(len(whole))] if dice.random() < 0.1 else whole)
    stays = dice.random() < 0.5
    try:
        if stays:
            answer = await asyncio.wait_for(reader.read(-1), 30) if dice.random() < 0.9 else b""
            return answer[:12].decode()
        for _ in range(dice.randrange(3)):
            await reader.read(100)
        return "left"
    finally:
        writer.transport.abort() if dice.random() < 0.5 else writer.close()


@pytest.mark.slow
def test_nothing_is_left_behind(make_backend, run_server):
    """The deadlines are far above a busy machine's pauses: a client that is late by them may find a reset."""
    backend = make_backend(eos=False)
    with run_server(backend, head_deadline=3.0, read_deadline=3.0) as server:

        async def storm() -> list[str]:
            return await asyncio.gather(*(client(server.port, seed) for seed in range(150)))

        httpx.get(f"{server.url}/health")
        before = open_files()
        outcomes = asyncio.run(storm())
        assert outcomes.count("HTTP/1.1 200") > 20 and outcomes.count("left") > 20
        until = time.monotonic() + 60
        while answering := len(server.app.state.service.answering):
            assert time.monotonic() < until, answering
            time.sleep(0.02)
        assert not left_open(before, "socket:")
        assert sorted(map(id, backend.closed)) == sorted(map(id, backend.requests))
        assert "afserve_http_requests_in_flight" in httpx.get(f"{server.url}/metrics").text
        assert server.app.state.service.bodies.held_bytes == 0
