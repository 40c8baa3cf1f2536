"""uvicorn's HTTP/1.1 with what it lacks: limits on connections, a deadline for heads, half-closed clients, refusals.

Reads at most READ_BYTES at once, so that no connection holds the event loop, however its bytes are cut.
"""

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from afserve.server.http.access_log import Seen
from afserve.server.http.connections import CONNECTION, Connections, client_address
from afserve.server.http.encryption import Handshake
from afserve.server.http.framing import HeadRefused, ServerConnection

# After a refusal the rest of what comes is read and dropped, so that the client gets to read why.
LINGER_SECONDS, LINGER_BYTES = 2.0, 1 << 20
# When to see whether a client that stopped sending has closed its socket, or only has nothing more to say.
LOOKS = (0.02, 0.1, 0.5)


def limited_http(connections: Connections, head_deadline: float) -> Callable[..., "LimitedHTTP"]:
    """A factory as uvicorn wants it."""

    def make(*args: Any, **kwargs: Any) -> LimitedHTTP:
        return LimitedHTTP(connections, head_deadline, *args, **kwargs)

    return make


class LimitedHTTP(H11Protocol, asyncio.BufferedProtocol):
    def __init__(self, connections: Connections, head_deadline: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: ServerConnection = ServerConnection(self.config.h11_max_incomplete_event_size or 65_536)
        self.app_state = {**self.app_state, CONNECTION: self}
        self.client_address = ""
        self.handshake: Handshake | None = None  # whose place this one takes, over TLS
        self._connections = connections
        self._head_deadline = head_deadline
        self._head_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._dropped: int | None = None
        self._quiet_since = self.loop.time()

    # ---- what asyncio tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client_address = client_address(transport)
        if self.handshake is not None:
            self._connections.note_gone(self.handshake)
        if self._connections.let_in(self):
            self._expect_use()
        else:
            self._refuse(503, "this server has no free connection; try again later", "capacity_error")

    def get_buffer(self, sizehint: int) -> memoryview:
        """A view: TLS reads its records into slices of it, and a slice of a bytearray is a copy that nobody reads."""
        return memoryview(self._connections.buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(memoryview(self._connections.buffer)[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self._dropped is not None:
            self._drop(len(data))
            return
        super().data_received(data)
        self._note()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the other direction open for the answer to a whole request, if somebody is there to read it."""
        self._expect_nothing()
        if self._dropped is not None or not self._answering():
            return False
        if self.transport.get_extra_info("sslcontext"):
            return False  # TLS ends both directions at once
        self._probe()
        self._look(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._connections.note_gone(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._quiet_since = self.loop.time()
        if self._look_timer is not None and not self._answering():
            self.transport.close()  # nothing came whole behind it
        self._note()

    def _should_upgrade(self) -> bool:
        """To nothing: a client that offers another protocol is answered in this one."""
        return False

    def quiet(self, seconds: float) -> bool:
        between = self.cycle is None or self.cycle.response_complete
        return between and not self.conn.trailing_data[0] and self.loop.time() - self._quiet_since >= seconds

    def make_room(self) -> None:
        self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    # ---- who waits, and for how long

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _note(self) -> None:
        if self._answering():
            self._connections.note_busy(self)
            self._expect_nothing()
        elif not self.transport.is_closing() and self._dropped is None:
            self._connections.note_waiting(self)
            between = self.cycle is None or self.cycle.response_complete
            if between and self.conn.trailing_data[0]:
                self._expect_head()
            else:
                self._expect_nothing()  # a body has a deadline of its own
                if between:
                    self._expect_use()

    def _expect_use(self) -> None:
        """Also of one that is new: a client that is starved sends its first request late."""
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _expect_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._head_deadline, self._head_late)

    def timeout_keep_alive_handler(self) -> None:
        """Once more round the loop: what a busy loop has left in the socket is read first, not answered by a reset."""
        self.timeout_keep_alive_task = self.loop.call_later(0, super().timeout_keep_alive_handler)

    def _head_late(self) -> None:
        """Once more round the loop, likewise."""
        self._head_timer = self.loop.call_later(0, self._end_head)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            late = f"the request's head did not arrive within {self._head_deadline:g} s; send it again"
            self._refuse(408, late, _INVALID)

    def _expect_nothing(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # ---- a client that sends nothing more

    def _probe(self) -> None:
        """Something that means nothing: a client that reads skips it, and a closed socket answers it with a reset.

        A body that is no stream of events has no room for it; there what is written anyway meets the reset.
        """
        if not self.cycle.response_started:
            if self.scope["http_version"] == "1.1":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif self.conn.writes_events:
            self.transport.write(self.conn.send(h11.Data(data=b":\n\n")) or b"")

    def _look(self, times: int) -> None:
        if self.transport.is_closing():
            return
        peer: socket.socket = self.transport.get_extra_info("socket")
        if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        wait = LOOKS[min(times, len(LOOKS) - 1)]
        self._look_timer = self.loop.call_later(wait, self._look, times + 1)

    # ---- refusals of what is no request

    def send_400_response(self, msg: str) -> None:
        """Not HTTP, or a head over the limit: said in the API's error shape, then closed."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if isinstance(error, HeadRefused):
            self._refuse(status, str(error), _INVALID)
        else:
            self._refuse(status, _WORDS.get(status, f"{msg} It is not valid HTTP/1.1."), _INVALID)

    def _refuse(self, status: int, message: str, kind: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self._take_over()
        error = {"message": message, "type": kind, "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        parts = [] if self.conn.expects_no_body else [h11.Data(data=body)]
        head = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
        for event in (head, *parts, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._linger()

    def _take_over(self) -> None:
        """Whoever answers the request whose body went wrong finds that its client has gone."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _linger(self) -> None:
        self._dropped = 0
        self._expect_nothing()
        with contextlib.suppress(OSError, NotImplementedError):  # TLS has no end of one direction
            self.transport.write_eof()
        self._head_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _drop(self, size: int) -> None:
        assert self._dropped is not None
        self._dropped += size
        if self._dropped > LINGER_BYTES:
            self.transport.close()


_INVALID = "invalid_request_error"
_WORDS = {
    431: "the request's head is over the limit of --max-header-bytes",
    501: "Transfer-Encoding: only chunked is understood; send the body so, or with its Content-Length",
}


_STATE = "afserve.direct"


class Direct:
    """Parts of one answer's body written to its socket at once: nobody waits, and no layer between is asked. What has
    to wait goes the long way. The answer comes in chunks and has begun; what is written counts as `seen`.

    It holds what it asks for each token, not the connection: a step of many streams finds little of any in the cache.
    """

    __slots__ = ("_cycle", "_flow", "_seen", "_write")

    def __init__(self, http: LimitedHTTP, seen: Seen) -> None:
        self._cycle, self._flow, self._write, self._seen = http.cycle, http.flow, http.transport.write, seen

    def takes_more(self) -> bool:
        """Whether the client is there and takes more now."""
        return not (self._flow.write_paused or self._cycle.disconnected)

    def write_chunk(self, data: bytes) -> None:
        """One chunk, as h11 writes it: of its state a chunk changes nothing."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        self._seen.sent += len(data)


def offer(scope: Scope, seen: Seen) -> None:
    """Where the request came by a socket, and its answer goes in chunks."""
    http = scope["state"].get(CONNECTION)
    if isinstance(http, LimitedHTTP) and scope["http_version"] == "1.1" and scope["method"] != "HEAD":
        scope["state"][_STATE] = Direct(http, seen)


def direct_of(scope: Scope) -> Direct | None:
    found = scope.get("state", {}).get(_STATE)
    return found if isinstance(found, Direct) else None
