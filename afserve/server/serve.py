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
from afserve.server.encryption import renew, server_context
from afserve.server.protocol import limited_http
from afserve.server.service import Service

log = logging.getLogger("afserve.server")
# After the drain: time for the last bytes to leave before connections are dropped.
CLOSING_SECONDS = 1


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
        raise ConfigError(
            f"port: cannot listen on {host}:{port}: {error.strerror or error}; choose another with --port",
            param="port",
        ) from error
    sock.setblocking(False)
    return sock


async def serve(app: Starlette, sock: socket.socket, stop: asyncio.Event) -> None:
    """Answers until `stop` is set, then drains: refuses new requests, finishes those begun, ends the rest.

    Signals are the caller's. Closes `sock`.
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
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for end in service.at_end:
            await end()
        ended = await service.inflight.drain(service.settings.drain_seconds)
        if ended:
            log.warning("%d requests were ended while the server stopped", ended)
    finally:
        stopping.cancel()
        if renewing is not None:
            renewing.cancel()
        server.should_exit = True
        await serving
        sock.close()
        await service.text.close()


def _return_freed_memory() -> None:
    """Loading a tokenizer of 128k tokens leaves about 90 MB freed but not returned; glibc does so when asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Server(uvicorn.Server):
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
