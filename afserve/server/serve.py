"""The application on a listening socket, from the first connection to the last answer of a draining server."""

import asyncio
import contextlib
import ctypes
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from afserve.errors import ConfigError
from afserve.logs import open_access_log
from afserve.server.endpoints.service import Service
from afserve.server.http.connections import Connections
from afserve.server.http.encryption import Handshake, Handshakes, renew, server_context
from afserve.server.http.protocol import LimitedHTTP, limited_http

log = logging.getLogger("afserve.server")
# After the drain: time for the last bytes to leave before connections are dropped.
CLOSING_SECONDS = 1
LOOK_SECONDS = 0.05  # between two looks at who is still connected
# Clients use a connection again that has been quiet for less: httpx, under the Python SDKs, up to 5 s, undici to 4 s.
QUIET_SECONDS = 6.0
_TURNS_TO_CLOSE = 3  # of the loop, until asyncio has closed a socket that was dropped, TLS included


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything slow starts. Port 0 lets the system choose."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, so that asyncio sets TCP_NODELAY: else an answer waits 40 ms for the client's ACK.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError.about(
            "port", f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --port"
        ) from error
    sock.setblocking(False)
    return sock


async def serve(
    app: Starlette, sock: socket.socket, stop: asyncio.Event, leave: asyncio.Event | None = None
) -> None:
    """Answers until `stop` is set, then drains: refuses new requests, finishes those begun, ends the rest.

    `leave` is set where others go on listening on `sock`: then nobody is refused, see `_leave`. Signals are the
    caller's. Closes `sock`.
    """
    service: Service = app.state.service
    _return_freed_memory()
    settings = service.settings
    config = _config(app, service)
    renewing: asyncio.Task[None] | None = None
    if settings.certfile:
        config.load()
        config.ssl = server_context(settings.certfile, settings.keyfile)
        renewing = asyncio.create_task(renew(config.ssl, settings.certfile, settings.keyfile))
    server = _Server(config, service.connections, settings.head_deadline)
    if settings.access_log is not None:
        open_access_log(settings.access_log, settings.log_format)
    for begin in service.at_start:
        await begin()
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    leaving = asyncio.create_task((leave or stop).wait())
    try:
        await asyncio.wait({serving, stopping, leaving}, return_when=asyncio.FIRST_COMPLETED)
        for end in service.at_end:
            await end()
        if leave is not None and leave.is_set() and not serving.done():
            await _leave(service, sock, stop)
        ended = await service.answering.drain(service.settings.drain_seconds)
        if ended:
            log.warning("%d requests were ended while the server stopped", ended)
    finally:
        stopping.cancel()
        leaving.cancel()
        if renewing is not None:
            renewing.cancel()
        server.should_exit = True
        await serving
        await service.resumables.end_all()
        sock.close()
        await service.text.end_processes()
        await service.accounts.stop_telling()
        for hosted in service.models:
            hosted.end_keeping()
        await service.spans.send_rest()
        await service.database.close_file()
        if service.audit is not None:
            await asyncio.to_thread(service.audit.finish_writing)


async def _leave(service: Service, sock: socket.socket, stop: asyncio.Event) -> None:
    """Accepts no more, and answers on each connection once more, saying that this is the last time.

    A connection that has been quiet for QUIET_SECONDS is closed: its client is not about to use it. Ends when none is
    left, after `restart_seconds`, or when `stop` is set.
    """
    loop, settings = asyncio.get_running_loop(), service.settings
    loop.remove_reader(
        sock
    )  # closing follows later: what was accepted in this turn becomes a connection first
    service.connections.leaving = True
    until = loop.time() + settings.restart_seconds
    await asyncio.sleep(LOOK_SECONDS)
    while len(service.connections) and loop.time() < until and not stop.is_set():
        service.connections.close_quiet(QUIET_SECONDS)
        await asyncio.sleep(LOOK_SECONDS)
    service.resumables.leave_all()


def _return_freed_memory() -> None:
    """Loading a tokenizer of 128k tokens leaves about 90 MB freed but not returned; glibc does so when asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Server(uvicorn.Server):
    """`handshake` is how many seconds a client of HTTPS has for TLS; asyncio's own limit is a minute."""

    def __init__(self, config: uvicorn.Config, connections: Connections, handshake: float) -> None:
        super().__init__(config)
        self._connections = connections
        self._handshake = handshake

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does, where HTTP is plain; over TLS connections are counted before the handshake."""
        config = self.config
        if config.ssl is None or sockets is None:
            await super().startup(sockets)
            return
        self.servers = []
        for sock in sockets:
            entrance = Handshakes(self._connections, config.ssl, self._handshake, self._protocol)
            entrance.start(sock)
            self.servers.append(entrance)  # type: ignore[arg-type]  # it is closed and waited for, no more
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does; then what is still connected is dropped, since its loop may end now."""
        await super().shutdown(sockets)
        for connection in self.server_state.connections:
            connection.transport.abort()
        for _ in range(_TURNS_TO_CLOSE):
            await asyncio.sleep(0)

    def _protocol(self, handshake: Handshake) -> asyncio.Protocol:
        made = self.config.http_protocol_class(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )  # type: ignore[call-arg]
        assert isinstance(made, LimitedHTTP)
        made.handshake = handshake
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: Starlette, service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited_http(service.connections, service.settings.head_deadline),  # type: ignore[arg-type]
        proxy_headers=False,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(max(1, service.settings.keep_alive)),
        timeout_graceful_shutdown=CLOSING_SECONDS,
        h11_max_incomplete_event_size=service.settings.max_header_bytes,
    )
