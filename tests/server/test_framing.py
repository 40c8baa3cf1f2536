"""Raw bytes on a socket: what RFC 9112 demands of a server, however the bytes are cut."""

import json
import logging
import socket
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from afserve.server.gate import hosts_of

BODY = b'{"model":"tiny","prompt":"x","max_tokens":2}'
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
CLOSE = b"Connection: close\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n"


def post(*headers: bytes, body: bytes = BODY, version: bytes = b"1.1") -> bytes:
    return (
        b"POST /v1/completions HTTP/" + version + b"\r\n" + HOST + JSON + b"".join(headers) + b"\r\n" + body
    )


def get(target: bytes, host: bytes = HOST, *headers: bytes, version: bytes = b"1.1") -> bytes:
    return b"GET " + target + b" HTTP/" + version + b"\r\n" + host + b"".join(headers) + CLOSE + b"\r\n"


def answered(port: int, raw: bytes, cuts: tuple[int, ...] = ()) -> bytes:
    """All that comes until the server closes; a server that does not is a timeout."""
    with socket.create_connection(("127.0.0.1", port), 20) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start, end in pairwise((0, *cuts, len(raw))):
            sock.sendall(raw[start:end])
        found = b""
        while part := sock.recv(65536):
            found += part
    return found


REFUSED = {
    "both lengths": (
        400,
        post(b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % len(BODY), body=CHUNKED),
    ),
    "both, the other way": (400, post(b"transfer-encoding: chunked\r\ncontent-length: 5\r\n", body=CHUNKED)),
    "chunks in HTTP/1.0": (400, post(b"Transfer-Encoding: chunked\r\n", body=CHUNKED, version=b"1.0")),
    "no host": (400, b"GET /health HTTP/1.1\r\n\r\n"),
    "two hosts": (400, get(b"/health", HOST + HOST)),
    "a host with a space": (400, get(b"/health", b"Host: a b\r\n")),
    "a host with a path": (400, get(b"/health", b"Host: a/b\r\n")),
    "a host with a user": (400, get(b"/health", b"Host: u@localhost\r\n")),
    "an address with a user": (400, get(b"http://u@localhost/health")),
    "an address without a host": (400, get(b"http:///health")),
    "another scheme": (400, get(b"ftp://localhost/health")),
    "no path": (400, get(b"health")),
    "an asterisk": (400, get(b"*")),
    "a space before the colon": (400, b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n"),
    "NUL in a header": (400, get(b"/health", HOST, b"X: a\x00b\r\n")),
    "CR in front": (400, b"\r" + GET),
    "a sign in a length": (400, post(b"Content-Length: +5\r\n")),
    "two lengths": (400, post(b"Content-Length: 5\r\nContent-Length: 6\r\n")),
    "a negative chunk": (400, post(b"Transfer-Encoding: chunked\r\n", body=b"-1\r\n\r\n")),
    "a chunk that is too short": (
        400,
        post(b"Transfer-Encoding: chunked\r\n", body=b"2\r\nabc\r\n0\r\n\r\n"),
    ),
    "a coding that is not known": (501, post(b"Transfer-Encoding: gzip, chunked\r\n", body=CHUNKED)),
    "an expectation": (417, post(b"Expect: tea\r\nContent-Length: 44\r\n")),
    "HTTP/2.0": (505, get(b"/health", version=b"2.0")),
    "the preface of HTTP/2": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x07" * 32),
}
SERVED = {
    "an empty line in front": b"\r\n" + GET,
    "two of them": b"\r\n\r\n" + GET,
    "one without CR": b"\n" + GET,
    "an address": get(b"http://localhost/health", b"Host: elsewhere\r\n"),
    "one in capitals": get(b"HTTP://LOCALHOST:80/health"),
    "one in HTTP/1.0": b"GET http://localhost/health HTTP/1.0\r\n\r\n",
    "a later minor version": get(b"/health", version=b"1.2"),
    "a folded header": get(b"/health", HOST, b"X: a\r\n b\r\n"),
    "an upgrade": get(b"/health", HOST, b"Upgrade: h2c\r\n"),
    "a chunk extension and a trailer": post(
        b"Transfer-Encoding: chunked\r\n" + CLOSE,
        body=CHUNKED.replace(b"2c\r\n", b'2c;a="b"\r\n')[:-2] + b"X: y\r\n\r\n",
    ),
    "100-continue": post(b"Expect: 100-Continue\r\nContent-Length: 44\r\n" + CLOSE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_closed(server, caplog, name):
    status, raw = REFUSED[name]
    found = answered(server.port, raw + GET)
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"\r\nconnection: close" in head.lower()
    assert b"\r\ndate: " in head.lower()
    error = json.loads(body)["error"]  # and nothing behind it
    assert error["message"] and error["type"] == "invalid_request_error"
    assert "Traceback" not in caplog.text and not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("name", SERVED)
def test_served(server, name):
    found = answered(server.port, SERVED[name])
    assert found.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 "))


@pytest.mark.parametrize(
    "raw",
    [
        b"HEAD /health HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        b"HEAD /health HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
    ],
)
def test_an_answer_to_head_has_no_body(server, caplog, raw):
    head, _, body = answered(server.port, raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and body == b"" and "Traceback" not in caplog.text


def test_empty_lines_between_requests(server):
    length = b"Content-Length: %d\r\n" % len(BODY)
    found = answered(server.port, post(length) + b"\r\n" + post(length) + b"\r\n\r\n" + GET)
    assert found.count(b"HTTP/1.1 200 OK") == 3


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([*SERVED, *(name for name, (status, _) in REFUSED.items() if status != 505)]),
    cuts=st.lists(st.integers(0, 200), max_size=5),
)
@example(name="an empty line in front", cuts=[1])
@example(name="CR in front", cuts=[1])
def test_however_it_is_cut(server, name, cuts):
    raw = SERVED[name] if name in SERVED else REFUSED[name][1]
    status = 200 if name in SERVED else REFUSED[name][0]
    found = answered(server.port, raw, tuple(sorted(cut for cut in cuts if cut <= len(raw))))
    assert found.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("target", "host", "origin", "status"),
    [
        (b"http://localhost/v1/completions", b"evil.example", None, 400),
        (b"http://evil.example/v1/completions", b"localhost", None, 403),
        (b"http://127.0.0.1:80/v1/completions", b"evil.example", b"http://127.0.0.1:80", 400),
        (b"http://127.0.0.1:80/v1/completions", b"evil.example", b"http://evil.example", 403),
        (b"http://evil.example/v1/completions", b"localhost", b"http://evil.example", 403),
    ],
)
def test_the_host_of_an_address_is_the_one_that_counts(
    make_backend, run_server, target, host, origin, status
):
    """400: it came through, to an empty body."""
    with run_server(make_backend(), hosts=hosts_of("127.0.0.1", ())) as guarded:
        headers = b"Host: " + host + b"\r\n" + (b"" if origin is None else b"Origin: " + origin + b"\r\n")
        raw = b"POST " + target + b" HTTP/1.1\r\n" + headers + CLOSE + b"Content-Length: 0\r\n\r\n"
        assert answered(guarded.port, raw).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("length", [b"999999999", b"9223372036854775808", b"9" * 20])
def test_a_length_over_the_limit_is_refused_at_once_and_not_invited(server, length):
    """Nothing of the body comes: who waits for "100 Continue" is told before it sends."""
    raw = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Expect: 100-continue\r\nContent-Length: " + length + b"\r\n\r\n"
    )
    assert answered(server.port, raw).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("chunk", [b"-1\r\n", b"zz\r\n", b"99999999999999999999999\r\n"])
def test_a_body_that_is_broken_before_it_was_asked_for(server, caplog, chunk):
    """Who expects "100 Continue" and sends a broken chunk at once has been refused by then."""
    raw = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk
    )
    assert answered(server.port, raw).startswith(b"HTTP/1.1 400 ")
    assert "Traceback" not in caplog.text and not [r for r in caplog.records if r.levelno >= logging.ERROR]
