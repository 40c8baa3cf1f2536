"""No body within the limit holds the event loop: the CPU time of every callback is measured while it is answered, in
rounds of an empty loop, which take as much longer on a slow machine."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import httpx
import pytest

from afserve.server.http.framing import HEAD_LINES

MOST_ROUNDS = 6_000_000  # about a tenth of a second here; the longest callbacks take half of it
SIZE = 8 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def filled(head: str, item: str, tail: str, size: int = SIZE) -> bytes:
    """`item` as often as it fits."""
    return (head + item * ((size - len(head) - len(tail)) // len(item)) + tail).encode()


def biases() -> bytes:
    bias = ",".join(f'"{i}":0' for i in range(700_000))
    return f'{{"prompt":"x","logit_bias":{{{bias}}}}}'.encode()


def hostile() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    yield "empty prompts", COMPLETIONS, partial(filled, '{"prompt":["x"', ',""', "]}")
    yield "short prompts", COMPLETIONS, partial(filled, '{"prompt":["x"', ',"x"', '],"n":2}')
    yield "token ids", COMPLETIONS, partial(filled, '{"prompt":[5', ",5", "]}")
    yield "lists of token ids", COMPLETIONS, partial(filled, '{"prompt":[[5]', ",[5]", "]}")
    yield "one long text", COMPLETIONS, partial(filled, '{"prompt":"', "a b ", '"}')
    yield "one word", COMPLETIONS, partial(filled, '{"prompt":"', "a", '"}')
    yield "other letters", COMPLETIONS, partial(filled, '{"prompt":"', "\\u65e5", '"}')
    yield "biases", COMPLETIONS, biases
    yield "stops", COMPLETIONS, partial(filled, '{"prompt":"x","stop":["x"', ',"x"', "]}")
    yield "stop ids", COMPLETIONS, partial(filled, '{"prompt":"x","stop_token_ids":[5', ",5", "]}")
    yield "lists", COMPLETIONS, partial(filled, '{"prompt":"x","other":[[]', ",[]", "]}")
    yield "objects", COMPLETIONS, partial(filled, '{"prompt":"x","other":[{}', ",{}", "]}")
    yield "depth", COMPLETIONS, lambda: b"[" * SIZE
    yield "digits", COMPLETIONS, partial(filled, '{"prompt":"x","seed":', "9", "}")
    yield "long integers", COMPLETIONS, partial(filled, '{"prompt":"x","other":[1', "," + "9" * 4200, "]}")
    yield "a long name", COMPLETIONS, partial(filled, '{"prompt":"x","model":"', "é", '"}', SIZE // 2)
    yield "a long key", COMPLETIONS, partial(filled, '{"prompt":"x","logit_bias":{"', "9", '":1}}')
    yield "not quite JSON", COMPLETIONS, partial(filled, '{"prompt":[5', ",5", "]]")
    yield "messages", CHAT, partial(filled, '{"messages":[{}', ",{}", "]}")
    yield (
        "parts",
        CHAT,
        partial(
            filled,
            '{"messages":[{"role":"user","content":[{"type":"text","text":"x"}',
            ',{"type":"text","text":"x"}',
            "]}]}",
        ),
    )
    yield "a long message", CHAT, partial(filled, '{"messages":[{"role":"user","content":"', "a b ", '"}]}')
    yield (
        "tools",
        CHAT,
        partial(filled, '{"messages":[{"role":"user","content":"x"}],"tools":[{}', ",{}", "]}"),
    )
    yield "text to tokenize", "/tokenize", partial(filled, '{"prompt":"', "a b ", '"}')
    yield "ids to detokenize", "/detokenize", partial(filled, '{"tokens":[5', ",5", "]}")
    yield "a placement", "/admin/placement", partial(filled, '{"layers":[[0]', ",[0]", "]}")


HOSTILE = {name: (path, body) for name, path, body in hostile()}  # bodies are made when they are sent


def most_seconds(tried: int = 100_000) -> float:
    """Of CPU, for MOST_ROUNDS at the pace of this moment."""
    paces = []
    for _ in range(3):
        began = time.thread_time()
        for _ in range(tried):
            pass
        paces.append(time.thread_time() - began)
    return max(paces) / tried * MOST_ROUNDS


class LoopTime:
    """The longest callback of any event loop of another thread than this one, in CPU seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest, self.what = 0.0, ""
        run, here = asyncio.Handle._run, threading.current_thread()

        def measured(handle: asyncio.Handle) -> None:
            if threading.current_thread() is here:
                run(handle)
                return
            began = time.thread_time()
            what = repr(handle)[:300]
            run(handle)
            took = time.thread_time() - began
            if took > self.longest:
                self.longest, self.what = took, what

        monkeypatch.setattr(asyncio.Handle, "_run", measured)


@pytest.fixture
def loop_time(frozen_heap, monkeypatch) -> LoopTime:
    return LoopTime(monkeypatch)


@pytest.fixture(scope="module")
def guarded(make_backend, run_server):
    with run_server(make_backend(), admin_keys=("root",)) as server:
        yield server


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_large_body(guarded, loop_time, name):
    path, make = HOSTILE[name]
    body = make()
    assert len(body) <= SIZE
    headers = {"content-type": "application/json", "authorization": "Bearer root"}
    reply = httpx.post(guarded.url + path, content=body, headers=headers, timeout=120)
    assert reply.status_code in (200, 202, 400, 404), reply.text[:300]
    assert reply.status_code < 300 or len(reply.text) < 600, reply.text[:600]
    assert loop_time.longest < most_seconds(), loop_time.what
    assert httpx.get(f"{guarded.url}/health").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["empty prompts", "one word", "biases", "not quite JSON", "digits"])
def test_a_small_body(server, loop_time, name):
    """The largest that is prepared on the loop itself."""
    path, make = HOSTILE[name]
    body = make()
    for cut in (body[:4000] + body[-10:], json.dumps({"prompt": "a b " * 2000}).encode()):
        httpx.post(server.url + path, content=cut, headers={"content-type": "application/json"}, timeout=60)
    assert loop_time.longest < most_seconds(), loop_time.what


@pytest.mark.slow
def test_a_body_in_chunks_of_one_byte(server, loop_time):
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), 60) as sock:
        sock.sendall(head + b"1\r\n \r\n" * 50_000 + b'e\r\n{"prompt":"x"}\r\n0\r\n\r\n')
        assert sock.recv(12) == b"HTTP/1.1 200"
    assert loop_time.longest < most_seconds(), loop_time.what


@pytest.mark.parametrize(
    ("lines", "status"), [(HEAD_LINES - 2, b"200"), (HEAD_LINES - 1, b"431"), (14_000, b"431")]
)
def test_a_head_of_many_short_lines(server, loop_time, lines, status):
    head = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + b"a:\r\n" * lines + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 60) as sock:
        sock.sendall(head)
        assert sock.recv(12) == b"HTTP/1.1 " + status
    assert loop_time.longest < most_seconds(), loop_time.what


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_long_answer_with_every_score(make_backend, run_server, loop_time, stream):
    backend = make_backend(eos=False)
    backend.model = type(backend.model)("tiny", backend.model.path, 4096, 400, 1)
    ask = {
        "prompt": [5] * 3900, "echo": True, "logprobs": 20, "n": 4, "max_tokens": 60, "ignore_eos": True,
        "stream": stream,
    }  # fmt: skip
    with run_server(backend) as server:
        reply = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=120)
    assert reply.status_code == 200, reply.text[:300]
    if not stream:
        choices = reply.json()["choices"]
        assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [3960] * 4
    assert loop_time.longest < most_seconds(), loop_time.what


@pytest.mark.slow
def test_an_answer_has_a_limit(make_backend, run_server):
    with run_server(make_backend(eos=False), max_answer_bytes=2000) as server:
        ask = {"prompt": "x", "max_tokens": 200, "logprobs": 5}
        reply = httpx.post(f"{server.url}/v1/completions", json=ask)
        assert reply.status_code == 400 and "--max-answer-bytes" in reply.json()["error"]["message"]
        reply = httpx.post(f"{server.url}/v1/completions", json={**ask, "stream": True})
        assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
def test_what_is_measured_is_seen(loop_time):
    def busy(until: Callable[[], bool]) -> None:
        while not until():
            pass

    most = most_seconds()

    def run() -> None:
        loop = asyncio.new_event_loop()
        began = time.thread_time()
        loop.call_soon(busy, lambda: time.thread_time() > began + 1.2 * most)
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert loop_time.longest > most and "busy" in loop_time.what
