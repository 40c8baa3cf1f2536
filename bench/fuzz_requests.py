"""Requests that no client should send, drawn from a seed: bodies of every surface, changed, in odd framing, sent oddly.

Each is a function of (seed, number) alone, so one can be sent again. Knows no server.
"""

import gzip
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from bench.fuzz_bodies import BODIES, MISSING, changed, written

# Without `/live`, which never ends. What changes the deployment is refused: the battery sends no key.
ROUTES = (
    *(
        "/",
        "/health",
        "/ping",
        "/ready",
        "/version",
        "/metrics",
        "/load",
        "/status",
        "/openapi.json",
        "/docs",
    ),
    *(
        "/v1/models",
        "/v1/models/nano",
        "/v1/models/%2e%2e/%ff",
        "/v1/nothing",
        "/static/live.css",
        "/static/../app.py",
    ),
    *(
        "/api/tags",
        "/api/version",
        "/api/ps",
        "/tokenizer_info",
        "/tokenizer_info?model=%00",
        "/v1/files",
        "/v1/batches",
    ),
    *("/v1/files/file-0", "/v1/files/..%2f/content", "/v1/batches/batch_0", "/v1/responses/resp_0?after=%00"),
    *(
        "/v1/requests/cmpl-0",
        f"/v1/requests/{'0' * 32}/events",
        f"/v1/requests/{'f' * 32}/answer",
        "/v1/cache",
        "/v1/cache?key=%00",
        "/v1/cache/warm",
        "//",
        "/%",
        "/?" + "a" * 999,
    ),
    *(
        "/admin/placement",
        "/admin/routing/dump",
        "/admin/scale",
        "/admin/drain",
        "/admin/fault",
        "/admin/restart",
    ),
)
HEADERS = (
    *(
        "Authorization: Bearer x",
        "Authorization: Basic eDp5",
        "Origin: https://evil.example",
        "Origin: null",
        "Host: evil.example",
    ),
    *(
        "Expect: 100-continue",
        "Expect: tea",
        "Last-Event-ID: 9",
        f"X-Request-ID: {'a' * 500}",
        "Accept: text/event-stream",
    ),
    *(
        "Connection: Upgrade\r\nUpgrade: websocket",
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c",
        "TE: trailers",
    ),
    *("Content-Type: text/plain", "Content-Type: application/json; charset=utf-16", "Content-Encoding: gzip"),
    *(
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: identity",
        "Content-Length: 3",
        "Content-Length: -1",
    ),
    *(
        "X: a\r\n folded",
        "X : a",
        "X: \x00",
        "Range: bytes=0-1",
        "traceparent: 00-x",
        "x-api-key: x",
        "anthropic-version: 1",
    ),
    *(
        f"X: {'y' * 9000}",
        "\r\n".join(f"X-{i}: {i}" for i in range(200)),
        "Cookie: a=b",
        "Date: never",
        ": x",
    ),
)
NO_HTTP = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x07" * 200,
    *(
        b"",
        b"\r\n\r\n",
        b"\0" * 64,
        b"GET",
        b"GET / HTTP/0.9\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"\x05\x01\x00",
        b"* OK\r\n",
    ),
    *(b"GET / HTTP/3.0\r\nHost: a\r\n\r\n", b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n", b"x" * 70_000),
)


class Way(Enum):
    """How the bytes go, and what the client does then."""

    WHOLE = "whole"
    CUT = "cut"  # in pieces
    HALF = "half"  # closes its direction
    RESET = "reset"  # closes at once, unread
    LEAVES = "leaves"  # reads a little and closes


@dataclass(frozen=True, slots=True)
class Sent:
    """`cuts` are where the bytes are cut in pieces."""

    raw: bytes
    way: Way
    cuts: tuple[int, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether the client reads to the end."""
        return self.way not in (Way.RESET, Way.LEAVES)


def drawn(seed: int, number: int) -> Sent:
    dice = random.Random(f"{seed}-{number}")
    kind = dice.random()
    if kind < 0.03:
        raw = dice.choice(NO_HTTP)
    else:
        raw = b"".join(_requests(dice))
    way = dice.choices(list(Way), (70, 14, 6, 5, 5))[0]
    cuts = sorted(dice.randrange(len(raw) + 1) for _ in range(dice.randrange(1, 6))) if way is Way.CUT else ()
    return Sent(raw, way, tuple(cuts))


def _requests(dice: random.Random) -> Iterator[bytes]:
    """One, or a few in a pipeline; the last one asks to close."""
    for last in [False] * dice.choice((0, 0, 0, 0, 0, 0, 1, 2)) + [True]:
        if dice.random() < 0.04:
            yield dice.choice((b"\r\n", b"\n", b"\r\n\r\n"))
        yield _get(dice, last) if dice.random() < 0.25 else _post(dice, last)


def _get(dice: random.Random, last: bool) -> bytes:
    method = dice.choice(("GET",) * 6 + ("HEAD", "OPTIONS", "DELETE", "PUT", "TRACE", "get", "POST"))
    return _head(dice, method, dice.choice(ROUTES), [], last)


def _head(dice: random.Random, method: str, path: str, headers: list[str], last: bool) -> bytes:
    version = dice.choice(("1.1",) * 12 + ("1.0", "1.2", "2.0"))
    target = (
        path
        if dice.random() < 0.93
        else dice.choice(("http://localhost", "HTTP://127.0.0.1:1", "ftp://a", "")) + path
    )
    lines = [f"{method} {target} HTTP/{version}", "Host: localhost", *headers]
    lines += [dice.choice(HEADERS) for _ in range(dice.choice((0, 0, 0, 1, 1, 2)))]
    if last:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def _post(dice: random.Random, last: bool) -> bytes:
    path, body = dice.choice(BODIES)
    data, kind = _data(dice, path, body)
    headers = [] if dice.random() < 0.03 else [f"Content-Type: {kind}"]
    framed = dice.choices((_plain, _chunked, _wrong, _zipped), (70, 20, 6, 4))[0]
    more, payload = framed(dice, data)
    return _head(dice, "POST", path, [*headers, *more], last) + payload


def _data(dice: random.Random, path: str, body: Mapping[str, object]) -> tuple[bytes, str]:
    if path == "/v1/files":
        return _form(dice), "multipart/form-data; boundary=x"
    if dice.random() < 0.06:
        return dice.choice(MISSING), "application/json"
    value: object = body
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
        value = changed(dice, value)
    return written(dice, value).encode("utf-8", "surrogatepass"), "application/json"


def _form(dice: random.Random) -> bytes:
    line = written(
        dice, changed(dice, {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}})
    )
    name = dice.choice(("a.jsonl", "../../../etc/x", "", '"', "a" * 400, "\0"))
    parts = [
        'Content-Disposition: form-data; name="purpose"\r\n\r\n' + dice.choice(("batch", "", "x" * 99)),
        f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n{line}',
    ] * dice.choice((1, 1, 1, 400))
    end = dice.choice(("--x--\r\n", "--x--\r\n", "--x", ""))
    return ("".join(f"--x\r\n{part}\r\n" for part in parts) + end).encode("utf-8", "surrogatepass")


Framed = tuple[list[str], bytes]


def _plain(dice: random.Random, data: bytes) -> Framed:
    return [f"Content-Length: {len(data)}"], data


def _chunked(dice: random.Random, data: bytes) -> Framed:
    size = dice.choice((1, 7, 4096, 1 << 20)) if len(data) < 4096 else 4096
    extension = dice.choice((b"", b"", b';a="b"', b";" + b"x" * 400, b" "))
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    trailer = dice.choice((b"", b"", b"X: y\r\n", b"Host: evil\r\n" * 20))
    end = dice.choice(
        (b"0\r\n" + trailer + b"\r\n",) * 8 + (b"0\r\n", b"-1\r\n\r\n", b"zz\r\n", b"f" * 20 + b"\r\n", b"")
    )
    return ["Transfer-Encoding: chunked"], b"".join(
        b"%x%b\r\n%b\r\n" % (len(c), extension, c) for c in chunks
    ) + end


def _wrong(dice: random.Random, data: bytes) -> Framed:
    length = dice.choice((len(data) + 5, max(0, len(data) - 5), 0, 1 << 40, 10**30))
    both = dice.random() < 0.3
    return [f"Content-Length: {length}", *(["Transfer-Encoding: chunked"] if both else [])], data


def _zipped(dice: random.Random, data: bytes) -> Framed:
    packed = gzip.compress(data, mtime=0)
    return ["Content-Encoding: gzip", f"Content-Length: {len(packed)}"], packed
