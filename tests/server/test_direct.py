"""Tokens that a gateway hands on at once: the same bytes as those that go through a task, and the same manners."""

import asyncio
import json
import re
import socket
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.control.requests import TAKEN_AT_ONCE, Request, Requests
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent
from afserve.errors import AfserveError, PeerLost
from afserve.member import attention_life
from afserve.server.replies.completion_reply import CompletionReply
from tests.server.test_disconnect import post, read_all

MESSAGES = [{"role": "user", "content": "x"}]
COUNTED = {"include_usage": True, "continuous_usage_stats": True}
BODIES = {
    "completion": ("/v1/completions", {"prompt": "x"}),
    "completion with counts": ("/v1/completions", {"prompt": "x", "stream_options": COUNTED}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "chat with scores": ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 32}),
    "responses": ("/v1/responses", {"input": "x"}),
    "ollama": ("/api/chat", {"messages": MESSAGES}),
}
WAITING = {
    "stop strings": {"stop": ["lazy dog"]},
    "two choices": {"n": 2},
    "scores": {"logprobs": 1},
    "echo": {"echo": True},
    "resume": {"resume": 5},
}
_RANDOM = re.compile(
    rb'"[a-z]+[_-][0-9a-f]{24,}[^"]*"|"created(_at)?":("[^"]*"|[0-9.]+)|"[a-z_]*duration":[0-9]+'
)


def told(server, path: str, body: dict) -> bytes:
    """What a stream says, without its ids and times."""
    reply = httpx.post(f"{server.url}{path}", json={"model": "tiny", "stream": True, **body}, timeout=30)
    assert reply.status_code == 200, reply.text
    return _RANDOM.sub(b"_", reply.content)


def metrics(server) -> str:
    return httpx.get(f"{server.url}/metrics", timeout=60).text


@pytest.mark.parametrize("name", BODIES)
def test_the_same_events_whether_taken_or_not(server, name):
    path, body = BODIES[name]
    server.backend.reply = ' the quick brown fox é 日本 " \\ 🙂 jumps'
    pulled = told(server, path, body)
    server.backend.pushes = True
    assert told(server, path, body) == pulled
    assert server.backend.taken > 5


@pytest.mark.parametrize("name", WAITING)
def test_what_may_end_or_wait_goes_through_a_task(server, name):
    pulled = told(server, "/v1/completions", {"prompt": "x", **WAITING[name]})
    server.backend.pushes = True
    pushed = told(server, "/v1/completions", {"prompt": "x", **WAITING[name]})
    if name == "two choices":
        assert sorted(pushed.split(b"\n\n")) == sorted(pulled.split(b"\n\n"))
    else:
        assert pushed == pulled
    assert server.backend.taken == 0


def test_a_client_of_http_1_0_gets_no_chunks(server):
    server.backend.pushes = True
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        head = (
            b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        sock.sendall(head % len(body) + body)
        answer = read_all(sock)
    assert answer.endswith(b"data: [DONE]\n\n") and b"chunked" not in answer
    assert server.backend.taken == 0


def test_a_client_that_leaves_while_tokens_are_handed_on_ends_its_request(make_backend, run_server):
    backend = make_backend(eos=False, pushes=True)
    backend.model = type(backend.model)("tiny", backend.model.path, 1 << 20, 400, 1)
    with run_server(backend) as server:
        sock = post(server.port, "/v1/completions", prompt="x", stream=True, max_tokens=500_000)
        while b"data: " not in (piece := sock.recv(65536)):
            assert piece, "the stream ended before its first token"
        sock.close()
        assert backend.ended.wait(60)
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


@pytest.mark.slow
def test_a_client_that_does_not_read_is_dropped(make_backend, run_server):
    backend = make_backend(eos=False, reply="x" * 200, pushes=True)
    backend.model = type(backend.model)("tiny", backend.model.path, 1 << 20, 400, 1)
    with run_server(backend, write_deadline=0.2) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        data = json.dumps({"prompt": "x", "stream": True, "max_tokens": 500_000}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        assert backend.ended.wait(60)
        sock.close()
        until = time.monotonic() + 60
        while 'reason="slow_reader"} 1' not in (
            text := metrics(server)
        ):  # counted once its request has ended
            assert time.monotonic() < until, text
            time.sleep(0.01)
    assert backend.taken


def test_an_error_after_tokens_that_were_handed_on_is_an_event(server):
    server.backend.pushes, server.backend.fail_at = True, 9
    server.backend.eos, server.backend.error = False, PeerLost("attention-0", "died")
    answer = told(server, "/v1/completions", {"prompt": "x", "max_tokens": 40})
    events = [line[6:] for line in answer.split(b"\n") if line]
    assert events[-1] == b"[DONE]" and json.loads(events[-2])["error"]["type"] == "peer_error"
    assert len(events) == 9 + 2


def test_a_bug_of_one_stream_is_that_streams_alone(server, monkeypatch):
    server.backend.pushes, drawn, plain = True, [], CompletionReply.plain

    def broken(self, index, piece, tail):
        drawn.append(piece)
        if len(drawn) == 3:
            raise ZeroDivisionError
        return plain(self, index, piece, tail)

    monkeypatch.setattr(CompletionReply, "plain", broken)
    events = [line[6:] for line in told(server, "/v1/completions", {"prompt": "x"}).split(b"\n") if line]
    assert json.loads(events[-2])["error"]["type"] == "internal_error" and events[-1] == b"[DONE]"
    assert len(drawn) == 3 and server.backend.requests[0] in server.backend.closed
    assert b'"finish_reason":"stop"' in told(server, "/v1/completions", {"prompt": "x"})


def test_what_was_handed_on_counts(server):
    def sent() -> int:
        found = re.search(r"^afserve_generation_tokens_total(?:{[^}]*})? (\d+)", metrics(server), re.M)
        return int(found[1])

    before = sent()
    server.backend.pushes = True
    told(server, "/v1/completions", {"prompt": "x", "max_tokens": 12, "ignore_eos": True})
    assert server.backend.taken and sent() - before == 12


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 3)), max_size=30), st.booleans())
def test_every_event_comes_once_and_in_order(steps, fails):
    """`steps`: whether the taker takes the event, whether the loop has a turn after it, its tokens."""
    seen: list[TokenEvent] = []

    async def scene() -> None:
        opened = Request(GenerationRequest(0, (1,)))
        reading = 0

        def take(event: TokenEvent) -> bool:
            assert reading, "nobody is asked while the reader is busy"
            willing = steps[event.token_ids[0]][0]
            if willing:
                seen.append(event)
            return willing

        async def read() -> None:
            nonlocal reading
            while True:
                reading += 1
                event = await opened.get()
                reading -= 1
                seen.append(event)
                if event.finish_reason is not None:
                    return
                await asyncio.sleep(0)  # it is busy with this one

        opened.taker = take
        reader = asyncio.create_task(read())
        for number, (_, turn, tokens) in enumerate(steps):
            opened.put(TokenEvent(0, (number,) * tokens))
            if turn:
                await asyncio.sleep(0)
        opened.put(AfserveError("x") if fails else TokenEvent(0, (99,), "length"))
        opened.put(TokenEvent(0, (100,)))
        if fails:
            with pytest.raises(AfserveError):
                await reader
        else:
            await reader
        assert opened.generated == [n for n, (_, _, k) in enumerate(steps) for _ in range(k)] + [99] * (
            not fails
        )

    asyncio.run(scene())
    assert [event.token_ids[0] for event in seen] == [*range(len(steps)), *[99] * (not fails)]


def test_one_message_hands_on_a_bounded_number():
    async def scene() -> tuple[int, int]:
        requests, taken = Requests(), []
        opened = [requests.open(GenerationRequest(i, (1,)), 0.0) for i in range(TAKEN_AT_ONCE + 5)]
        readers = []
        for one in opened:
            requests.place(one, attention_life(0, 0), 0.0)
            one.taker = lambda event: taken.append(event) is None
            readers.append(asyncio.create_task(one.get()))
        await asyncio.sleep(0)
        requests.deliver([TokenEvent(one.number, (7,)) for one in opened])
        await asyncio.sleep(0)
        woken = sum(reader.done() for reader in readers)
        for reader in readers:
            reader.cancel()
        return len(taken), woken

    assert asyncio.run(scene()) == (TAKEN_AT_ONCE, 5)
