"""Names, origins, media types, connections, stalled bodies, readers that do not read, clients that half close."""

import json
import os
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress

import httpx
import pytest

from afserve.errors import ConfigError
from afserve.server.gate import hosts_of
from afserve.server.http.settings import ServerSettings, read_keys

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
ASK = b'{"prompt":"x"}'
LOOPBACK = hosts_of("127.0.0.1", ())


def connect(server, source="127.0.0.1"):
    return socket.create_connection(("127.0.0.1", server.port), 20, source_address=(source, 0))


def read_all(sock):
    """Until it is closed; a connection that is closed before all of it was read ends with a reset."""
    answer = b""
    with suppress(ConnectionResetError):
        while part := sock.recv(65536):
            answer += part
    return answer


def resident(server):
    """KiB of this process, which is the server's too."""
    with open(f"/proc/{os.getpid()}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


# ---- who may ask


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:{port}", 200), ("localhost:{port}", 200), ("LOCALHOST", 200), ("[::1]:{port}", 200),
     ("127.0.0.2", 200), ("evil.example", 403), ("evil.example:{port}", 403), ("127.0.0.1.evil.example", 403),
     ("10.0.0.1", 403), ("[2001:db8::1]:80", 403)],
)  # fmt: skip
def test_a_loopback_server_has_loopback_names(make_backend, run_server, host, status):
    with run_server(make_backend(), hosts=LOOPBACK) as server:
        reply = httpx.get(f"{server.url}/status", headers={"host": host.format(port=server.port)})
    assert reply.status_code == status
    assert status == 200 or "--allowed-host" in reply.json()["error"]["message"]


def test_which_names_are_whose():
    assert "localhost" in hosts_of("::1", ()) and "box" in hosts_of("127.0.0.1", ("Box",))
    assert hosts_of("0.0.0.0", ()) == frozenset()
    assert hosts_of("10.0.0.5", ("box",)) == {"10.0.0.5", "box"}


@pytest.mark.parametrize(
    ("origin", "allowed", "status"),
    [("http://127.0.0.1:{port}", (), 200), ("https://evil.example", (), 403), ("null", (), 403), ("http://[", (), 403),
     ("http://127.0.0.1:1", (), 200),
     ("http://localhost:3000", (), 200), ("https://[::1]", (), 200), ("http://localhost", (), 200),
     ("http://localhost.evil.example", (), 403), ("http://localhost@evil.example", (), 403),
     ("http://127.0.0.1.evil.example:80", (), 403), ("http://localhost:123456", (), 403),
     ("ftp://localhost", (), 403), ("http://evil.example/http://localhost", (), 403),
     ("https://chat.example", ("https://chat.example/",), 200),
     ("https://evil.example", ("https://chat.example",), 403)],
)  # fmt: skip
def test_pages_of_other_sites(make_backend, run_server, origin, allowed, status):
    with run_server(make_backend(), hosts=LOOPBACK, origins=allowed) as server:
        headers = {"origin": origin.format(port=server.port)}
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, headers=headers)
        asked = {**headers, "access-control-request-method": "POST"}
        before = httpx.options(f"{server.url}/v1/completions", headers=asked)
    assert reply.status_code == status
    assert status == 200 or "--allowed-origin" in reply.json()["error"]["message"]
    if origin != "http://127.0.0.1:{port}":
        assert (before.status_code == 200) == (status == 200)
        assert ("access-control-allow-origin" in before.headers) == (status == 200)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", None, "application/jsonp"]
)
def test_bodies_are_json(http, kind):
    headers = {} if kind is None else {"content-type": kind}
    reply = http.post("/v1/completions", content=ASK, headers=headers)
    assert reply.status_code == 415 and "Content-Type: application/json" in reply.json()["error"]["message"]
    assert http.post(
        "/v1/completions", content=ASK, headers={"content-type": "Application/JSON; charset=utf-8"}
    )


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_file_that_others_read(tmp_path, mode):
    file = tmp_path / "keys"
    file.write_text("abc\n")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"type: chmod 600 {file}"):
        read_keys(file)
    file.chmod(0o600)
    assert read_keys(file) == ("abc",)


def test_metrics_may_be_open(make_backend, run_server):
    with run_server(make_backend(), api_keys=("one",), open_metrics=True) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert httpx.get(f"{server.url}/version").status_code == 401


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_connections", 0), ("read_deadline", float("nan")), ("text_seconds", float("inf")), ("max_inflight", 1.5)],
)  # fmt: skip
def test_limits_have_ranges(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: "):
        ServerSettings(**{name: value})


# ---- connections and bodies


def test_bodies_on_their_way_are_no_requests(make_backend, run_server):
    with run_server(make_backend(), max_inflight=2) as server, ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(connect(server)).sendall(POST % 100 + b"{")
        while len(server.app.state.service.connections) < 8:
            time.sleep(0.01)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.slow
def test_small_bodies_pass_while_large_ones_stall(make_backend, run_server):
    size = 1 << 18
    with run_server(make_backend(), max_body_bytes=size) as server, ExitStack() as stack:
        stalled = [stack.enter_context(connect(server)) for _ in range(6)]
        for sock in stalled:
            sock.sendall(POST % size + b" " * (size - 1))
        until = time.monotonic() + 20
        while server.app.state.service.bodies.held_bytes < 3 * size:
            assert time.monotonic() < until
            time.sleep(0.01)
        large = json.dumps({"prompt": "x", "user": "y" * (size - 1000)})
        for body in (ASK, large, ASK):
            headers = {"content-type": "application/json"}
            reply = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
            assert reply.status_code == 200, reply.text
        assert server.app.state.service.bodies.held_bytes <= 4 * size


@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_client"])
def test_the_longest_waiting_connection_makes_room(make_backend, run_server, limit):
    with run_server(make_backend(hold_at=1), **{limit: 4}) as server, ExitStack() as stack:
        busy = stack.enter_context(connect(server))
        busy.sendall(POST % len(ASK) + ASK)
        assert server.backend.holding.wait(20)
        idle = [stack.enter_context(connect(server)) for _ in range(4)]
        for sock in idle:
            sock.sendall(b"G")
        assert read_all(idle[0]) == b""  # closed for the newest; the busy one stays
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.backend.release.set()
        assert busy.recv(12) == b"HTTP/1.1 200"


def test_when_all_are_being_answered_a_new_one_is_refused(make_backend, run_server):
    with run_server(make_backend(hold_at=1), max_connections=2) as server, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connect(server)).sendall(POST % len(ASK) + ASK)
        until = time.monotonic() + 20
        while len(server.app.state.service.answering) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        reply = httpx.get(f"{server.url}/health")
        assert reply.status_code == 503 and reply.headers["retry-after"]
        server.backend.release.set()


def test_the_limit_of_one_client_is_not_anothers(make_backend, run_server):
    with run_server(make_backend(), max_connections_per_client=3) as server, ExitStack() as stack:
        other = stack.enter_context(connect(server, "127.0.0.2"))
        mine = [stack.enter_context(connect(server)) for _ in range(5)]
        assert read_all(mine[0]) == b"" and read_all(mine[1]) == b""
        other.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert other.recv(12) == b"HTTP/1.1 200"


def crowd(server, stack, connections, stalled, readers):
    """One byte each; bodies that stop; streams that nobody reads."""
    for _ in range(connections):
        stack.enter_context(connect(server)).sendall(b"P")
    for _ in range(stalled):
        sock = stack.enter_context(connect(server))
        sock.sendall(POST % (8 << 20))
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                sock.send(b" " * 65536)
    ask = json.dumps({"prompt": "x", "stream": True, "n": 8, "logprobs": 20, "max_tokens": 100_000}).encode()
    for _ in range(readers):
        stack.enter_context(connect(server)).sendall(POST % len(ask) + ask)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("connections", "stalled", "readers"),
    [(300, 4, 2), pytest.param(5000, 40, 20, marks=pytest.mark.long)],
)
def test_a_second_client_is_served_and_memory_is_bounded(
    frozen_heap, make_backend, run_server, connections, stalled, readers
):
    backend = make_backend(eos=False)
    backend.model = type(backend.model)("tiny", backend.model.path, 1 << 20, 400, 1)
    # nobody of the crowd is sent away before the second client has its answers
    forever = {"write_deadline": 600, "read_deadline": 600, "head_deadline": 600}
    with run_server(backend, **forever) as server, ExitStack() as stack:
        assert httpx.get(f"{server.url}/health").status_code == 200
        before = resident(server)
        crowd(server, stack, connections, stalled, readers)
        for _ in range(20):
            reply = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 4}, timeout=60
            )
            assert reply.status_code == 200
            assert reply.json()["usage"]["completion_tokens"] == 4
        most = min(connections, ServerSettings().max_connections, ServerSettings().max_connections_per_client)
        assert len(server.app.state.service.connections) > most - 25  # each of the 20 may have taken a place
        grown = resident(server) - before
        # 16 KiB a connection, four bodies, a socket's buffer and 64 pieces of every choice of a stream
        assert grown < 16 * connections + 4 * 8192 * 2 + 2048 * readers + 32_768, grown
        assert server.app.state.service.bodies.held_bytes <= 4 << 23


@pytest.mark.slow
def test_a_reader_that_does_not_read_is_cancelled_by_name(make_backend, run_server):
    backend = make_backend(eos=False, reply="x" * 200)
    backend.model = type(backend.model)("tiny", backend.model.path, 1 << 20, 400, 1)
    ask = json.dumps({"prompt": "x", "stream": True, "n": 3, "logprobs": 5, "max_tokens": 500_000}).encode()
    with run_server(backend, write_deadline=0.2) as server, closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(POST % len(ask) + ask)
        until = time.monotonic() + 60
        while 'afserve_http_cancelled_total{model_name="tiny",reason="slow_reader"} 1' not in (
            text := httpx.get(f"{server.url}/metrics").text
        ):
            assert time.monotonic() < until, text
            time.sleep(0.05)
        assert len(backend.closed) == len(backend.requests) == 3
        while len(server.app.state.service.connections) > 1:  # it was aborted: nobody would read the rest
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.slow
def test_a_whole_answer_that_is_not_read_is_dropped(make_backend, run_server):
    backend = make_backend(eos=False)
    backend.model = type(backend.model)("tiny", backend.model.path, 1 << 20, 400, 1)
    ask = json.dumps({"prompt": "x", "logprobs": 20, "max_tokens": 20_000}).encode()
    with run_server(backend, write_deadline=0.3) as server, closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(POST % len(ask) + ask)
        until = time.monotonic() + 60
        while 'reason="slow_reader"' not in httpx.get(f"{server.url}/metrics").text:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert len(server.app.state.service.answering) == 0


# ---- one direction closed


@pytest.mark.slow
def test_a_file_that_is_not_read_is_dropped(make_backend, run_server):
    with run_server(make_backend(), write_deadline=0.3, max_body_bytes=64 << 20) as server:
        file = ("x", b"x" * (32 << 20))
        sent = httpx.post(
            f"{server.url}/v1/files", files={"file": file}, data={"purpose": "batch"}, timeout=60
        ).json()
        with closing(socket.socket()) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(
                b"GET /v1/files/%s/content HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % sent["id"].encode()
            )
            until = time.monotonic() + 60
            while 'reason="slow_reader"' not in httpx.get(f"{server.url}/metrics").text:
                assert time.monotonic() < until
                time.sleep(0.05)
        assert httpx.get(f"{server.url}/v1/files/{sent['id']}/content").content == file[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_nothing_more_to_say_gets_its_answer(make_backend, run_server, stream):
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    with run_server(make_backend(hold_at=1)) as server:
        socks = [connect(server) for _ in range(20)]
        for sock in socks:
            sock.sendall(POST % len(body) + body)
            sock.shutdown(socket.SHUT_WR)
        assert server.backend.holding.wait(20)
        time.sleep(0.1)
        server.backend.release.set()
        for sock in socks:
            answer = read_all(sock)
            sock.close()
            assert b"HTTP/1.1 200 OK" in answer and b"finish_reason" in answer
            assert answer.endswith(b"}" if not stream else b"0\r\n\r\n")


@pytest.mark.slow
def test_a_file_is_whole_for_a_client_that_has_nothing_more_to_say(server):
    """Nothing is put into a body of a known length to see whether its client is there."""
    file = ("x", b"x" * (7 << 20))
    sent = httpx.post(f"{server.url}/v1/files", files={"file": file}, data={"purpose": "batch"}, timeout=60)
    path = b"/v1/files/%s/content" % sent.json()["id"].encode()
    with closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" % path)
        begun = sock.recv(1000)
        sock.shutdown(socket.SHUT_WR)
        assert (begun + read_all(sock)).partition(b"\r\n\r\n")[2] == file[1]


@pytest.mark.parametrize("at_once", [True, False])
def test_what_came_whole_before_a_client_closed_its_direction_is_answered(make_backend, run_server, at_once):
    body = json.dumps({"prompt": "x"}).encode()
    first, second = POST % len(body) + body, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    with run_server(make_backend(hold_at=1)) as server, connect(server) as sock:
        sock.sendall(first + second if at_once else first)
        assert server.backend.holding.wait(20)
        if not at_once:
            sock.sendall(second)
            time.sleep(0.1)
        sock.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
        server.backend.release.set()
        answers = read_all(sock)
    assert answers.count(b"HTTP/1.1 200 OK") == 2 and b"finish_reason" in answers


def test_one_that_was_refused_while_it_was_answered_and_then_says_nothing_more(
    make_backend, run_server, caplog
):
    """Bytes behind `Connection: close` are no request; what was being answered has been taken over by then."""
    body = json.dumps({"prompt": "x"}).encode()
    with run_server(make_backend(hold_at=1)) as server:
        with connect(server) as sock:
            sock.sendall((POST % len(body)).replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + body)
            assert server.backend.holding.wait(20)
            sock.sendall(b"x")
            assert read_all(sock).startswith(b"HTTP/1.1 400")
            sock.shutdown(socket.SHUT_WR)
            httpx.get(f"{server.url}/health")
        server.backend.release.set()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_one_that_says_nothing_more_before_its_request_is_whole(server):
    with connect(server) as sock:
        sock.sendall(POST % 100 + b"{")
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock) == b""


def test_a_head_over_the_limit_is_said(server):
    """However much of it comes: the answer is there to read, not a reset."""
    for size in (70_000, 500_000):
        with connect(server) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * size)
            answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 431") and b"--max-header-bytes" in answer


@pytest.mark.parametrize(
    "body",
    [{"prompt": "x", "logit_bias": {"9" * 5000: 1}}, {"prompt": "x", "logit_bias": {"a" * 5000: 1}},
     {"prompt": "x", "model": "m" * 5000}, {"prompt": "x", "seed": int("9" * 4000)},
     {"prompt": [int("9" * 4000)]}, {"prompt": "x", "response_format": {"type": "j" * 5000}},
     {"prompt": "x", "logit_bias": {"7": 1e300}}, {"prompt": "x", "k" * 5000: 1, "top_k": int("9" * 4000)}],
)  # fmt: skip
def test_a_refusal_is_short(http, body):
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code in (400, 404) and len(reply.text) < 400, reply.text


@pytest.mark.slow
def test_a_drain_waits_for_nobody_who_does_not_read(make_backend, run_server):
    backend = make_backend(eos=False, reply="x" * 200)
    backend.model = type(backend.model)("tiny", backend.model.path, 1 << 20, 400, 1)
    ask = json.dumps({"prompt": "x", "stream": True, "max_tokens": 500_000}).encode()
    with run_server(backend, drain_seconds=0.2, write_deadline=60) as server:
        socks = [connect(server) for _ in range(3)]
        for sock in socks:
            sock.sendall(POST % len(ask) + ask)
        until = time.monotonic() + 20
        while len(server.app.state.service.answering) < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.5)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 40  # of the 60 that they have to read
        for sock in socks:
            sock.close()


def test_who_insists_is_not_kept_waiting_and_streams_are_told(make_backend, run_server):
    backend = make_backend(hold_at=2)
    with run_server(backend, drain_seconds=600) as server:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={"prompt": "x", "stream": True}
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.ask_to_stop()
            threading.Timer(
                0.1, lambda: server._loop.call_soon_threadsafe(server.app.state.service.answering.insist)
            ).start()
            rest = [line for line in lines if line]
        assert "shutting down" in rest[-2] and rest[-1] == "data: [DONE]"


@pytest.mark.slow
def test_a_server_that_has_stopped_leaves_no_connection_open(make_backend, run_server):
    """Nor one whose client does not read: it would stay until somebody collects it."""
    with run_server(make_backend(), drain_seconds=0.1, max_body_bytes=16 << 20) as server:
        file, purpose = ("x", b"x" * (12 << 20)), {"purpose": "batch"}
        sent = httpx.post(f"{server.url}/v1/files", files={"file": file}, data=purpose, timeout=60).json()
        with closing(socket.socket()) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(20)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(
                b"GET /v1/files/%s/content HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % sent["id"].encode()
            )
            assert sock.recv(9) == b"HTTP/1.1 "
            server.stop()
            assert len(read_all(sock)) < len(file[1])
