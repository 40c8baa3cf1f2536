"""HTTPS: the certificate that clients see, read again when its file changes: it is renewed without a restart."""

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable

from afserve.errors import ConfigError
from afserve.server.http.connections import Connections, client_address_of

log = logging.getLogger("afserve.server")
_LOOK_SECONDS = 1.0


def server_context(certfile: str, keyfile: str) -> ssl.SSLContext:
    """Raises ConfigError where the two files are not a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {certfile}: cannot be used with the key in {keyfile}: {error}",
            param="ssl_certfile",
        ) from error
    return context


async def renew(context: ssl.SSLContext, certfile: str, keyfile: str) -> None:
    """Until cancelled: whoever connects after the files have changed sees the new certificate."""
    seen = _stamps(certfile, keyfile)
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        now = _stamps(certfile, keyfile)
        if now == seen:
            continue
        seen = now
        try:
            server_context(certfile, keyfile)  # both files fit each other, before anything is changed
            context.load_cert_chain(certfile, keyfile)
            log.warning("%s was read again", certfile)
        except ConfigError as error:
            log.warning("%s; the certificate from before stays in use", error.message)


def _stamps(*paths: str) -> tuple[tuple[int, int] | None, ...]:
    """None for a file that is not there at the moment."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


_PAUSE_SECONDS = 1.0  # without a file descriptor for another connection
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Handshake:
    """A place that is taken until TLS is agreed on, or until somebody else needs it more."""

    def __init__(self, peer: object, now: float) -> None:
        self.client_address = client_address_of(peer)
        self._began = now
        self.task: asyncio.Task[None] | None = None

    def quiet(self, seconds: float) -> bool:
        return asyncio.get_running_loop().time() - self._began >= seconds

    def make_room(self) -> None:
        self.abort()

    def abort(self) -> None:
        if self.task is not None:
            self.task.cancel()


class Handshakes:
    """Accepts on one listening socket: each connection takes a place from its first moment on. asyncio's own `ssl=`
    tells of a connection after its handshake, so that nobody who is silent until then would count. `make` gives the
    protocol of a connection, which frees the handshake's place when it takes its own; `seconds` are what a client has
    for TLS."""

    def __init__(
        self,
        connections: Connections,
        context: ssl.SSLContext,
        seconds: float,
        make: Callable[[Handshake], asyncio.BaseProtocol],
    ) -> None:
        self._connections, self._context, self._seconds, self._make = connections, context, seconds, make
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, listener: socket.socket) -> None:
        self._accepting = asyncio.create_task(self._accept(listener))

    def close(self) -> None:
        """Who has not agreed on TLS yet is dropped."""
        for task in (self._accepting, *self._tasks):
            if task is not None:
                task.cancel()

    async def wait_closed(self) -> None:
        tasks = [task for task in (self._accepting, *self._tasks) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listener)
            except OSError as error:
                if listener.fileno() < 0:
                    return  # it was closed
                if short := error.errno in _NO_ROOM:
                    log.error("no connection can be accepted: %s", error.strerror)
                await asyncio.sleep(_PAUSE_SECONDS if short else 0.0)  # else the one that came has gone again
                continue
            handshake = Handshake(peer, loop.time())
            if not self._connections.let_in(handshake):
                connection.close()
                continue
            task = handshake.task = asyncio.create_task(self._agree(handshake, connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _agree(self, handshake: Handshake, connection: socket.socket) -> None:
        """asyncio closes `connection` where this fails or is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: self._make(handshake),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._seconds,
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            log.debug("%s: no TLS: %s", handshake.client_address, error)
        finally:
            self._connections.note_gone(handshake)
