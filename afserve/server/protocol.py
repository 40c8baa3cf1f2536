"""uvicorn's HTTP/1.1 with two additions: a deadline for a request's headers, and refusals in JSON."""

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 15.0


class LimitedHTTP(H11Protocol):
    """A connection that sends half a request line does not stay. Header size is bounded by h11 itself."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._between_requests():
            self._expect_headers()
        else:
            self._forget_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_headers()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Not HTTP, or headers over the limit: said in the API's error shape, then closed."""
        message = f"{msg} It is not valid HTTP/1.1, or its headers are too large."
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state is h11.IDLE or self.conn.our_state is h11.SEND_RESPONSE:
            head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_headers(self) -> None:
        if self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._headers_late)

    def _headers_late(self) -> None:
        """Once more round the loop: what a busy loop has left in the socket is read first, not answered by a reset."""
        self._header_timer = self.loop.call_later(0, self.transport.close)

    def _forget_headers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
