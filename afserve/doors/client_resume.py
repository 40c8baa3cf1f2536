"""How a client goes on with a request whose connection broke: what to send next, and after which pause. No sockets.

The request is posted once, with an id that the client has drawn. After a break it is asked for by that id: the stream
behind the last event that was read whole, or the answer. The server keeps it for `seconds`.
"""

import random
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from afserve.doors.client_wire import error_of, unreachable
from afserve.errors import AfserveError, NotFoundError, OverloadedError, PeerLost

_FIRST_PAUSE, _LONGEST_PAUSE, _MOST_ASKED = 0.05, 1.0, 60.0
_PREFIXES = {"/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
BREAKS = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
_OURS = ("resume", "request_id")  # fields that a server may not know or not like


@dataclass(frozen=True, slots=True)
class Sending:
    """One HTTP request."""

    method: str
    path: str
    json: Mapping[str, object] | None = None
    headers: Mapping[str, str] | None = None

    def options(self) -> dict[str, Any]:
        """As httpx takes them."""
        return {"method": self.method, "url": self.path, "json": self.json, "headers": self.headers}


class Attempts:
    """One request. `seconds` 0: what breaks, breaks, and a closed connection ends it.

    `retries`: how often it is sent again to a server that had no room for it (429, or 503 with Retry-After).
    """

    def __init__(
        self, url: str, path: str, payload: Mapping[str, object], seconds: float, retries: int = 0
    ) -> None:
        self._url, self._path, self._payload, self._seconds = url, path, payload, seconds
        self._retries = self._retries_left = retries
        self._stream = bool(payload.get("stream"))
        self._last = self._pending = ""
        self._answered = False  # anything of the answer was read
        self._broken_at: float | None = None
        self._cause: AfserveError | None = None
        self._tries = 0
        self._new()

    def _new(self) -> None:
        self._own_id, self._posted = secrets.token_hex(16), False

    @property
    def _id(self) -> str:
        return _PREFIXES[self._path] + self._own_id

    def next(self) -> Sending:
        """What to send now."""
        if not self._posted:
            ours = {"resume": self._seconds, "request_id": self._own_id} if self._seconds else {}
            return Sending("POST", self._path, {**self._payload, **ours})
        last = {"last-event-id": self._last} if self._last else {}
        what = "events" if self._stream else "answer"
        return Sending("GET", f"/v1/requests/{self._id}/{what}", headers=last)

    def forget(self) -> Sending | None:
        """What ends it on the server; None where the closed connection does, or nothing was sent."""
        return Sending("DELETE", f"/v1/requests/{self._id}") if self._seconds and self._posted else None

    def heard(self, line: str) -> None:
        """A line of the stream, whole. An event counts once its data is there."""
        if line.startswith("id:"):
            self._pending = line[3:].strip()
        elif line.startswith("data:"):
            self._last = self._pending
            self._answered, self._broken_at, self._tries = True, None, 0

    def accepted(self) -> None:
        """The server has begun to answer."""
        self._posted = True

    def refused(self, response: httpx.Response) -> float:
        """The pause before the next attempt. Raises the server's error where there is none."""
        error = error_of(response.status_code, response.text, response.headers.get("retry-after"))
        if not self._posted:
            if self._seconds and (error.param in _OURS or _is_full(error)):
                self._seconds = 0.0
                return 0.0
            if self._cause is not None and response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                return self._pause(error)
            if isinstance(error, OverloadedError) and self._retries_left:
                self._retries_left -= 1
                return backoff(self._retries - self._retries_left, error.retry_after)
            raise error
        if isinstance(error, NotFoundError) and error.param == "request" and not self._answered:
            self._new()  # it has never arrived
            return self._pause(error)
        if isinstance(error, NotFoundError) and self._cause is not None:
            raise self._cause  # a server that keeps nothing, or not any more
        if isinstance(error, OverloadedError) or response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return self._pause(error)
        raise error

    def broke(self, error: httpx.TransportError | PeerLost) -> float:
        """The same for a connection that broke. Where nobody has ever answered, nobody is waited for."""
        cause = error if isinstance(error, PeerLost) else unreachable(self._url, error)
        first = not self._posted and self._cause is None
        if not self._seconds or (first and isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)):
            raise cause from error
        if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            self._posted = True  # perhaps; whoever asks by its id will know
        self._cause = cause
        return self._pause(cause)

    def _pause(self, error: AfserveError) -> float:
        now = time.monotonic()
        if self._broken_at is None:
            self._broken_at = now
        if now - self._broken_at >= self._seconds:
            raise error
        self._tries += 1
        return backoff(self._tries)


def backoff(tries: int, at_least: float = 0.0) -> float:
    """The pause after so many tries, in seconds; `at_least` is what the server asked for."""
    longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(tries, 10))
    return max(longest * random.uniform(0.5, 1.0), min(at_least, _MOST_ASKED))


def _is_full(error: AfserveError) -> bool:
    """The server has no room to keep it, and may have some to answer it."""
    return isinstance(error, OverloadedError) and error.message.startswith("resume:")
