"""A line for each request that was answered: who, what, how it ended, how long it took. No prompt, unless asked for.

The path is the route's, with its placeholders: what a client writes into a path or behind a question mark is not kept.
"""

import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.types import Message, Receive, Scope

from afserve.clock import Clock
from afserve.logs import ACCESS

log = logging.getLogger(ACCESS)
MOST_SHOWN = 16 << 10  # bytes of a body, where bodies are asked for
REQUEST_ID = "request_id"  # of a request's state
_SOUND_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_of(given: str | None) -> str:
    """The client's own, so that it finds its request in this log, where it is one word; else a new one."""
    return given if given is not None and _SOUND_ID.fullmatch(given) else secrets.token_hex(16)


def is_kept() -> bool:
    """Whether anybody writes lines of requests."""
    return log.isEnabledFor(logging.INFO) and bool(log.handlers)


def route_of(scope: Scope) -> str:
    return str(getattr(scope.get("route"), "path", "none"))


def named(scope: Scope) -> str:
    """A request as a span is called."""
    return f"{scope['method']} {route_of(scope)}"


@dataclass(slots=True)
class Seen:
    """What is known of one request when it ends."""

    clock: Clock
    began: float
    shows_bodies: bool = False
    status: int = 0
    sent: int = 0
    body: bytearray = field(default_factory=bytearray)

    def note_message(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.sent += len(message.get("body", b""))

    def watching(self, receive: Receive) -> Receive:
        """The beginning of the body is kept where it is to be shown."""
        if not self.shows_bodies:
            return receive

        async def received() -> Message:
            message = await receive()
            if len(self.body) < MOST_SHOWN:
                self.body += message.get("body", b"")[: MOST_SHOWN - len(self.body)]
            return message

        return received

    def attributes(self, request_id: str) -> dict[str, str | int]:
        return {"http.response.status_code": self.status, "afserve.request_id": request_id}

    def fields(self, scope: Scope, owner: str) -> dict[str, object]:
        client = scope.get("client")
        fields: dict[str, object] = {
            "method": scope["method"],
            "route": route_of(scope),
            "status": self.status,
            "seconds": round(self.clock.now() - self.began, 6),
            "bytes": self.sent,
            "client": client[0] if client else "",
            "key": owner,
        }
        if self.shows_bodies and self.body:
            fields["body"] = self.body.decode("utf-8", "replace")
        return fields

    def write_line(self, scope: Scope, fields: Mapping[str, object]) -> None:
        owner = fields["key"]
        words = f"{named(scope)} {self.status or 'gone'} {fields['seconds']:.3f} s {self.sent} bytes"
        words += f" {fields['client']}" + (f" key {owner}" if owner else "")
        words += f" body {fields['body']!r}" if "body" in fields else ""
        log.info(words, extra={REQUEST_ID: scope["state"].get(REQUEST_ID, ""), "fields": fields})
