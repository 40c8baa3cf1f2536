"""Client and AsyncClient behind a wire that breaks anywhere, and before servers that cannot keep requests."""

import asyncio
import json
import random
import socket
import threading
from contextlib import aclosing, closing, contextmanager, suppress

import httpx
import pytest

from afserve import AsyncClient, Client, SamplingParams
from afserve.errors import NotFoundError, OverloadedError, PeerLost

LONG = " the quick brown fox jumps over the lazy dog" * 3
PARAMS = SamplingParams(max_tokens=60, temperature=0, n=2, logprobs=1)
SEEDS = 12


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("afserve.doors.client_http._LONGEST_PAUSE", 0.01)


class BreakingWire:
    """A proxy that cuts each connection after a drawn number of bytes, in either direction; every sixth one holds."""

    def __init__(self, port: int, seed: int) -> None:
        self.dice, self.upstream, self.cuts = random.Random(seed), port, 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.threads = [threading.Thread(target=self.accept, daemon=True)]
        self.threads[0].start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listening.accept()
                self.threads.append(threading.Thread(target=self.relay, args=(client,), daemon=True))
                self.threads[-1].start()

    def relay(self, client: socket.socket) -> None:
        dice = self.dice
        up, down = (dice.choice([0, dice.randint(0, 300), dice.randint(0, 9000)]) for _ in range(2))
        if dice.random() < 1 / 6:
            up = down = 1 << 30
        up += dice.choice([0, 1 << 30, 1 << 30])
        with client, socket.create_connection(("127.0.0.1", self.upstream)) as server:
            back = threading.Thread(target=self.pump, args=(server, client, down), daemon=True)
            back.start()
            self.pump(client, server, up)
            back.join()

    def pump(self, source: socket.socket, to: socket.socket, budget: int) -> None:
        with suppress(OSError):
            while budget and (data := source.recv(min(budget, 4096))):
                to.sendall(data)
                budget -= len(data)
        self.cuts += not budget
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        for thread in self.threads:
            thread.join(10)


@contextmanager
def breaking(server, seed):
    wire = BreakingWire(server.port, seed)
    try:
        yield wire
    finally:
        wire.close()


def by_choice(deltas):
    texts, ends = ["", ""], [0, 0]
    for delta in deltas:
        texts[delta.index] += delta.text
        ends[delta.index] += delta.finish_reason is not None
    return texts, ends


def plain(body):
    return [(c["text"], c["logprobs"]) for c in body["choices"]]


@pytest.mark.slow
def test_whatever_breaks_every_token_comes_once(server):
    server.backend.reply = LONG
    with Client(server.url) as client:
        expected, whole = by_choice(client.complete_stream("x", PARAMS)), client.complete("x", PARAMS)
    cuts = 0
    for seed in range(SEEDS):
        with breaking(server, seed) as wire, Client(wire.url, timeout=20) as client:
            assert by_choice(client.complete_stream("x", PARAMS)) == expected
            assert plain(client.complete("x", PARAMS).body) == plain(whole.body)
            cuts += wire.cuts
    assert cuts > SEEDS, "the schedules test what they are for"


@pytest.mark.slow
def test_the_async_client_goes_on_too(server):
    server.backend.reply = LONG

    async def ask(url):
        async with AsyncClient(url, timeout=20) as client:
            deltas = [delta async for delta in client.chat_stream([{"role": "user", "content": "x"}], PARAMS)]
            whole = await client.chat([{"role": "user", "content": "x"}], PARAMS)
            return by_choice(deltas), [choice["message"] for choice in whole.body["choices"]]

    expected = asyncio.run(ask(server.url))
    for seed in range(SEEDS // 4):
        with breaking(server, seed) as wire:
            assert asyncio.run(ask(wire.url)) == expected


def test_leaving_a_stream_ends_it_on_the_server(server):
    server.backend.reply, server.backend.hold_at = LONG, 5
    with Client(server.url) as client, closing(client.complete_stream("x", PARAMS)) as deltas:
        next(deltas)
        kept = dict(server.backend.nodes_kept.answers)
        assert kept
    assert not kept.keys() & server.backend.nodes_kept.answers.keys()

    async def leave():
        async with AsyncClient(server.url) as client, aclosing(client.complete_stream("x", PARAMS)) as deltas:
            await anext(deltas)
            return dict(server.backend.nodes_kept.answers)

    kept = asyncio.run(leave())
    assert kept and not kept.keys() & server.backend.nodes_kept.answers.keys()


def test_without_resume_a_broken_connection_is_an_error(server):
    server.backend.reply = LONG
    cut = next(seed for seed in range(50) if breaks_early(server, seed))
    with breaking(server, cut) as wire, Client(wire.url, resume=0) as client, pytest.raises(PeerLost):
        list(client.complete_stream("x", PARAMS))


def breaks_early(server, seed):
    with breaking(server, seed) as wire, Client(wire.url, resume=0) as client:
        try:
            list(client.complete_stream("x", PARAMS))
        except PeerLost:
            return True
    return False


class Old(httpx.BaseTransport):
    """A server that knows nothing of `resume`: its first answer breaks off."""

    def __init__(self, *answers) -> None:
        self.answers, self.asked = list(answers), []

    def handle_request(self, request):
        self.asked.append((request.method, request.url.path, json.loads(request.content or b"{}")))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def said(status, message, param=None, kind="invalid_request_error"):
    return httpx.Response(
        status, json={"error": {"message": message, "type": kind, "param": param, "code": None}}
    )


WHOLE = {
    "choices": [{"text": "y", "finish_reason": "length", "index": 0}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}


@pytest.mark.parametrize(
    "refusal",
    [
        said(400, "resume: is unknown", "resume"),
        said(400, "request_id: is not liked", "request_id"),
        said(429, "resume: 1024 requests are kept", kind="overloaded_error"),
    ],
)
def test_a_server_that_cannot_keep_it_is_asked_without(refusal):
    old = Old(refusal, httpx.Response(200, json=WHOLE))
    with Client("http://x", transport=old) as client:
        assert client.complete("x").text == "y"
    assert ["resume" in body for _, _, body in old.asked] == [True, False]


def test_other_refusals_are_told_as_they_are():
    full = Old(said(429, "queues are full", kind="overloaded_error"))
    with (
        Client("http://x", retries=0, transport=full) as client,
        pytest.raises(OverloadedError, match="queues are full"),
    ):
        client.complete("x")


def test_an_old_server_that_breaks_is_told_as_what_it_was():
    old = Old(httpx.ReadError("reset"), said(404, "there is no GET /v1/requests", kind="not_found_error"))
    with Client("http://x", transport=old) as client, pytest.raises(PeerLost, match="reset"):
        client.complete("x")


def test_what_never_arrived_is_sent_again_and_what_is_over_is_not():
    lost = said(404, "request: not kept", "request", "not_found_error")
    old = Old(httpx.ReadError("reset"), lost, httpx.Response(200, json=WHOLE))
    with Client("http://x", transport=old) as client:
        assert client.complete("x").text == "y"
    first, second = old.asked[0][2]["request_id"], old.asked[2][2]["request_id"]
    assert first != second and old.asked[1][1] == f"/v1/requests/cmpl-{first}/answer"
    gone = Old(httpx.ReadError("reset"), said(404, "request: not kept", "other", "not_found_error"))
    with Client("http://x", transport=gone) as client, pytest.raises((PeerLost, NotFoundError)):
        client.complete("x")


def test_time_is_bounded():
    breaks = [httpx.ReadError("reset") for _ in range(1000)]
    with Client("http://x", transport=Old(*breaks), resume=0.2) as client, pytest.raises(PeerLost):
        client.complete("x")
    with Client("http://x", transport=Old(httpx.ConnectError("none"))) as client, pytest.raises(PeerLost):
        client.complete("x")  # nobody has ever answered: nobody is waited for
