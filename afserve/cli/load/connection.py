"""One streamed request over HTTP/1.1, and connections that are kept for the next one.

What arrives is stamped with the time before it is parsed.
"""

import asyncio
import ssl
from dataclasses import dataclass, field
from time import perf_counter
from urllib.parse import urlsplit

from afserve.cli.load.heard import Heard
from afserve.cli.load.http_answer import Events, HttpAnswer
from afserve.errors import ConfigError, ProtocolError

OK = 200
# what the bytes of a server that is none of ours can raise: wrong fields, an endless number, endless nesting
_NO_ANSWER = (
    ProtocolError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go. `prefix` is what stands before /v1 in their path; each of the `headers` ends its line."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    prefix: str
    headers: str

    @classmethod
    def from_url(cls, url: str, key: str | None) -> "Server":
        """From `http://host:port`, with or without /v1. Raises ConfigError."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"--url {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url}: not an http:// or https:// address")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n"
        if key is not None:
            headers += f"Authorization: Bearer {key}\r\n"
        return cls(parts.hostname, port, tls, parts.path.rstrip("/").removesuffix("/v1"), headers)

    def request(self, path: str, body: bytes) -> bytes:
        head = f"POST {self.prefix}{path} HTTP/1.1\r\n{self.headers}Content-Length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body


class HttpConnection(asyncio.Protocol):
    """One exchange at a time: `ask` returns when its answer is whole or the connection is gone."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._heard: Heard | None = None
        self._over: asyncio.Future[None] | None = None
        self.answered = False  # anything of the present answer has come
        self.open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def exchange(self, request: bytes, heard: Heard) -> None:
        assert self._transport is not None
        self._answer, self._events, self._heard = HttpAnswer(), Events(), heard
        self._error, self._whole, self.answered = b"", False, False
        self._over = asyncio.get_running_loop().create_future()
        if not self.open:
            raise ConnectionResetError("the server had closed the connection")
        self._transport.write(request)
        try:
            await self._over
        except BaseException:
            self.close()
            raise

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        heard, over = self._heard, self._over
        if heard is None or over is None or over.done():
            self.close()  # nobody has asked
            return
        self.answered = True
        try:
            body = self._answer.feed(data)
            if self._answer.status == OK:
                for event in self._events.feed(body):
                    self._whole = heard.event(event, now) or self._whole
            else:
                self._error += body
        except _NO_ANSWER as error:
            heard.mark_failed(f"not an answer of this API: {error}"[:160], now)
            self._finish(keep=False)
            return
        if self._answer.done:
            self._end(now)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self._over is not None and not self._over.done():
            if self.answered:
                self._answer.closed()
                self._end(perf_counter())
            else:
                self._over.set_exception(ConnectionResetError("the connection was closed without an answer"))

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def _end(self, now: float) -> None:
        assert self._heard is not None
        if self._answer.status == OK:
            self._heard.status = OK
            self._heard.end(now, whole=self._whole)
        elif self._answer.status:
            self._heard.refuse(self._answer.status, self._error, now)
        else:
            self._heard.mark_failed("the connection broke off in the head of an answer", now)
        self._finish(keep=self._answer.keeps_open and self._answer.done)

    def _finish(self, *, keep: bool) -> None:
        if not keep:
            self.close()
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


@dataclass(slots=True)
class ConnectionPool:
    """To one server; those that are free are used again, the last one first."""

    server: Server
    _free: list[HttpConnection] = field(default_factory=list)

    async def send_and_hear(self, path: str, body: bytes, heard: Heard, timeout: float) -> None:
        """Fills `heard` from being sent to its end, whatever that is."""
        request = self.server.request(path, body)
        heard.sent = perf_counter()
        try:
            async with asyncio.timeout(timeout):
                await self._exchange(request, heard)
        except TimeoutError:
            heard.mark_failed(f"no end within {timeout:g} s", perf_counter())
        except OSError as error:
            heard.mark_failed(f"{type(error).__name__}: {error.strerror or error}", perf_counter())

    async def _exchange(self, request: bytes, heard: Heard) -> None:
        while (connection := self._kept()) is not None:
            try:
                await connection.exchange(request, heard)
            except ConnectionResetError:
                if connection.answered:
                    raise
                continue  # the server closed it while it was free: nothing of this request was read
            self._keep(connection)
            return
        connection = await self._opened()
        try:
            await connection.exchange(request, heard)
        finally:
            self._keep(connection)

    async def _opened(self) -> HttpConnection:
        server = self.server
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(HttpConnection, server.host, server.port, ssl=server.tls)
        return connection

    def _kept(self) -> HttpConnection | None:
        while self._free:
            if (found := self._free.pop()).open:
                return found
        return None

    def _keep(self, connection: HttpConnection) -> None:
        if connection.open:
            self._free.append(connection)

    def close(self) -> None:
        while self._free:
            self._free.pop().close()
