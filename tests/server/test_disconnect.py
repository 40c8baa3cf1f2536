"""A client that leaves, reads slowly or comes while the server stops: over raw sockets."""

import json
import socket
import threading
import time
from contextlib import closing
from http.client import HTTPConnection

import httpx
import pytest

from afserve import Client, SamplingParams
from afserve.errors import CapacityError, ConfigError, PeerLost
from afserve.server.serve import bind


def post(port: int, path: str, **body: object) -> socket.socket:
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", port), 20)
    sock.sendall(
        b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (path.encode(), len(data), data)
    )
    return sock


def read_all(sock: socket.socket) -> bytes:
    answer = b""
    while part := sock.recv(65536):
        answer += part
    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_client_gone_cancels(server, stream, hold_at, n):
    server.backend.hold_at = hold_at
    sock = post(server.port, "/v1/completions", prompt="x", stream=stream, n=n)
    assert server.backend.holding.wait(60)
    sock.close()
    assert server.backend.ended.wait(60)
    assert not server.backend.release.is_set()
    late = time.monotonic() + 60
    while len(server.backend.closed) < len(server.backend.requests):
        assert time.monotonic() < late, "a choice goes on although its client has gone"
        time.sleep(0.01)
    assert sorted(map(id, server.backend.closed)) == sorted(map(id, server.backend.requests))


def test_client_gone_while_the_body_comes(server):
    sock = socket.create_connection(("127.0.0.1", server.port), 20)
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    )
    sock.close()
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.backend.requests == []


def test_one_failing_choice_cancels_the_others(server):
    server.backend.hold_at, server.backend.fail_at = None, 1
    server.backend.error = PeerLost("attention-0", "died:\n  File /secret")
    reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "n": 4})
    assert "secret" not in reply.text
    assert reply.status_code == 503 and "attention-0" in reply.json()["error"]["message"]
    assert len(server.backend.closed) == len(server.backend.requests)


def test_error_in_mid_stream_is_an_event(server):
    server.backend.fail_at, server.backend.error = 2, PeerLost("attention-0", "died")
    reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stream": True})
    events = [line[6:] for line in reply.text.splitlines() if line]
    assert reply.status_code == 200 and events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["type"] == "peer_error"


@pytest.mark.slow
def test_slow_reader_holds_the_engine_back_then_is_dropped(make_backend, run_server):
    backend = make_backend(eos=False, reply="x" * 200)
    backend.model = type(backend.model)("tiny", backend.model.path, 1 << 20, 400, 1)
    with run_server(backend, write_deadline=0.2) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        data = json.dumps({"prompt": "x", "stream": True, "max_tokens": 500_000}).encode()
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
        )
        assert backend.ended.wait(60)
        sock.close()
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_stop_finishes_what_has_begun(make_backend, run_server):
    backend = make_backend(hold_at=2)
    with run_server(backend) as server, Client(server.url) as client:
        with closing(client.complete_stream("x", SamplingParams(max_tokens=32))) as deltas:
            text = next(deltas).text
            server.ask_to_stop()
            while httpx.get(f"{server.url}/ready").status_code == 200:
                pass
            with Client(server.url, retries=0) as late, pytest.raises(CapacityError):
                late.complete("y")
            backend.release.set()
            text += "".join(delta.text for delta in deltas)
        assert text == backend.reply


@pytest.mark.parametrize("stream", [False, True])
def test_stop_ends_what_does_not_finish(make_backend, run_server, stream):
    backend = make_backend(hold_at=2)
    with run_server(backend, drain_seconds=0.05) as server:
        sock = post(server.port, "/v1/completions", prompt="x", stream=stream)
        assert backend.holding.wait(20)
        server.ask_to_stop()
        answer = read_all(sock)
        sock.close()
    assert b"shutting down" in answer and backend.closed
    assert answer.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")


def test_gateway_limit(make_backend, run_server):
    backend = make_backend(hold_at=1)
    with run_server(backend, max_inflight=1) as server:
        sock = post(server.port, "/v1/completions", prompt="x")
        assert backend.holding.wait(20)
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "y"})
        assert reply.status_code == 429 and reply.headers["retry-after"]
        backend.release.set()
        assert b"200 OK" in sock.recv(65536)
        sock.close()


def test_half_a_request_line_does_not_stay(make_backend, run_server):
    with run_server(make_backend(), head_deadline=0.05, keep_alive=20) as server:
        for start in (b"G", b"\r\nGET", b"GET /health HT"):
            with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
                sock.sendall(start)
                assert read_all(sock).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


@pytest.mark.slow
@pytest.mark.parametrize("first", (b"", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))
@pytest.mark.parametrize("said", (b"", b"\r\n"))
def test_a_connection_that_says_nothing_is_closed_when_its_time_is_over(
    make_backend, run_server, first, said
):
    with (
        run_server(make_backend(), head_deadline=600, keep_alive=0.3) as server,
        socket.create_connection(("127.0.0.1", server.port), 20) as sock,
    ):
        sock.sendall(first)
        answer = sock.recv(65536) if first else b""
        sock.sendall(said)
        answer += read_all(sock)
        assert answer.startswith(b"HTTP/1.1 200") if first else not answer


@pytest.mark.slow
def test_a_connection_that_is_not_used_at_once_may_be_used_later(make_backend, run_server):
    with (
        run_server(make_backend(), head_deadline=0.05, keep_alive=20) as server,
        socket.create_connection(("127.0.0.1", server.port), 20) as sock,
    ):
        time.sleep(0.25)
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_an_idle_connection_stays_longer_than_a_head_may_take(make_backend, run_server):
    with run_server(make_backend(), head_deadline=0.1, keep_alive=20) as server:
        client = HTTPConnection("127.0.0.1", server.port, timeout=20)
        client.connect()
        with client.sock as first:
            for _ in range(2):
                client.request("GET", "/health")
                assert client.getresponse().read() and client.sock is first
                time.sleep(0.25)
            first.sendall(b"GET /heal")
            assert read_all(first).startswith(b"HTTP/1.1 408 ")


def test_pipelined_requests_are_answered_in_order(server):
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        sock.sendall(
            b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        )
        answer = read_all(sock)
    assert answer.index(b'"status"') < answer.index(b'"version"')


def test_port_in_use_is_said_plainly(server):
    with pytest.raises(ConfigError, match=f"127.0.0.1:{server.port}: Address already in use; choose another"):
        bind("127.0.0.1", server.port)


def test_a_stream_that_has_nothing_to_say_says_that_it_is_there(server, monkeypatch):
    monkeypatch.setattr("afserve.server.answers.writer.QUIET_SECONDS", 0.02)
    server.backend.hold_at = 2
    lines = []
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"prompt": "x", "stream": True}, timeout=20
    ) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if lines.count(": still here") == 3:
                server.backend.release.set()
    assert lines[-2:] == ["data: [DONE]", ""]
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))
    server.backend.hold_at = None
    assert (
        text == httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).json()["choices"][0]["text"]
    )


def test_clients_skip_what_only_says_that_the_stream_is_there(server, monkeypatch):
    monkeypatch.setattr("afserve.server.answers.writer.QUIET_SECONDS", 0.02)
    server.backend.hold_at = 2
    threading.Timer(0.2, server.backend.release.set).start()
    with Client(server.url) as client:
        text = "".join(delta.text for delta in client.complete_stream("x", SamplingParams(max_tokens=32)))
    assert text == " the quick brown fox"
