"""Spans of requests for OpenTelemetry: OTLP over HTTP, as JSON, in batches, never in a request's way.

A request is one span, below the caller's own where it sends `traceparent` (W3C Trace Context). Each sequence of a
completion or chat has `queue`, `prefill` and `decode` below it, by what its attention node and its tokens told. No span
has a prompt.
"""

import asyncio
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import httpx
from starlette.types import Scope

from afserve.engine.scheduling.request import Origin
from afserve.server.http.access_log import REQUEST_ID
from afserve.tracing import otlp
from afserve.tracing.otlp import MOST_HELD, MOST_SENT, PATIENCE, SEND_SECONDS, Attributes, SpanIds

SCOPE = "afserve.gateway"
STATE = "span"  # of a request's scope
CLOSE_SECONDS = 5.0  # for all that is held when the server stops
_PARENT = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
log = logging.getLogger("afserve.server")


class Spans:
    """Collects and sends. Without an endpoint it does nothing. Its task begins with the first span."""

    def __init__(self, endpoint: str = "", transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.on = bool(endpoint)
        self.dropped = 0
        self._url = otlp.traces_url(endpoint)
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._held: deque[dict[str, object]] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._said = False

    def begin_span(self, traceparent: str | None) -> "Span":
        """Of a request. One that the caller does not sample is not recorded."""
        if not self.on:
            return NOWHERE
        found = _PARENT.fullmatch(traceparent or "")
        if found is None or set(found[1]) == {"0"} or set(found[2]) == {"0"}:
            return Span(self, secrets.token_hex(16), secrets.token_hex(8), "")
        if not int(found[3], 16) & 1:
            return NOWHERE
        return Span(self, found[1], secrets.token_hex(8), found[2])

    def hold_span(self, span: dict[str, object]) -> None:
        if len(self._held) >= MOST_HELD or self._closing.is_set():
            self.dropped += 1
            return
        self._held.append(span)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())

    async def send_rest(self) -> None:
        """What is held is sent, if the collector answers within CLOSE_SECONDS; the rest is counted as dropped."""
        self._closing.set()
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=CLOSE_SECONDS)
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        if self._held:
            self.dropped += len(self._held)
            log.warning("%d spans were not sent while the server stopped", len(self._held))
            self._held.clear()
        if self._client is not None:
            await self._client.aclose()

    async def _send_all(self) -> None:
        if self._client is None:
            self._client = httpx.AsyncClient(transport=self._transport, timeout=PATIENCE, trust_env=False)
        while self._held:
            with suppress(TimeoutError):
                async with asyncio.timeout(SEND_SECONDS):
                    await self._closing.wait()
            while self._held and await self._send(self._client):
                pass

    async def _send(self, client: httpx.AsyncClient) -> bool:
        """The first ones; they are held until the collector has them or refuses them. False: refused."""
        some = list(islice(self._held, MOST_SENT))
        try:
            reply = await client.post(self._url, json=otlp.document(some, SCOPE))
            reply.raise_for_status()
        except httpx.HTTPError as error:
            self._lost(len(some), error)
            return False
        self._forget(len(some))
        return True

    def _forget(self, count: int) -> None:
        for _ in range(count):
            self._held.popleft()

    def _lost(self, count: int, error: httpx.HTTPError) -> None:
        self._forget(count)
        self.dropped += count
        if not self._said:
            log.warning("spans cannot be sent (%s); this is said once", type(error).__name__)
        self._said = True


@dataclass(frozen=True, slots=True)
class Span:
    """One request. Times are Unix seconds."""

    spans: Spans | None
    trace_id: str
    id: str
    parent: str

    def end_span(self, name: str, began: float, attributes: Attributes, *, failed: bool) -> None:
        if self.spans is None:
            return
        ids = SpanIds(self.trace_id, self.id, self.parent)
        self.spans.hold_span(otlp.span(ids, name, began, time.time(), attributes, otlp.SERVER, failed=failed))

    def sequence(self, phases: Mapping[str, float], attributes: Attributes) -> None:
        """Seconds of each phase, in their order; the last one ends now."""
        if self.spans is None:
            return
        at = time.time() - sum(phases.values())
        for name, seconds in phases.items():
            ids = SpanIds(self.trace_id, secrets.token_hex(8), self.id)
            self.spans.hold_span(otlp.span(ids, name, at, at + seconds, attributes))
            at += seconds

    @property
    def traceparent(self) -> str:
        """For what is done elsewhere below this span; empty where nothing is recorded."""
        return "" if self.spans is None else f"00-{self.trace_id}-{self.id}-01"


NOWHERE = Span(None, "", "", "")


def span_of(scope: Scope) -> Span:
    """Of a request that has passed the gate."""
    found = scope.get("state", {}).get(STATE)
    return found if isinstance(found, Span) else NOWHERE


def origin_of(scope: Scope) -> Origin:
    """What attention nodes are to call a request of this connection."""
    name = scope.get("state", {}).get(REQUEST_ID, "")
    return Origin(name if isinstance(name, str) else "", span_of(scope).traceparent)
