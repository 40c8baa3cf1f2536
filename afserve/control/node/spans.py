"""Sends a node's spans to a collector, in batches, from a thread of its own: the loop only appends to a list.

Bounded: what comes while too many wait is dropped and counted. Knows no requests.
"""

import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException

from afserve.adviser import Adviser
from afserve.tracing import otlp
from afserve.tracing.otlp import MOST_HELD, MOST_SENT, PATIENCE, SEND_SECONDS

CLOSE_SECONDS = 2.0
log = logging.getLogger("afserve.node")


class NodeSpans:
    """Of `node`, to the collector at `endpoint`. Its thread begins with the first span; `close` sends what is left."""

    def __init__(self, endpoint: str, node: str) -> None:
        self.dropped = 0
        self._url, self._node = otlp.traces_url(endpoint), node
        self._held: list[Mapping[str, object]] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._said = False
        self._advice = Adviser("sending spans")

    def put(self, span: Mapping[str, object]) -> None:
        self._advice.ask(time.monotonic(), lambda: self._put(span), None)

    def _put(self, span: Mapping[str, object]) -> None:
        with self._lock:
            if len(self._held) >= MOST_HELD or self._closing.is_set():
                self.dropped += 1
                return
            self._held.append(span)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits for the collector for at most CLOSE_SECONDS."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        sending = Adviser("sending spans")
        while not self._closing.wait(SEND_SECONDS):
            sending.ask(time.monotonic(), self._send_all, None)
        sending.ask(time.monotonic(), self._send_all, None)

    def _send_all(self) -> None:
        while some := self._taken():
            self._send(some)

    def _taken(self) -> list[Mapping[str, object]]:
        with self._lock:
            some, self._held = self._held[:MOST_SENT], self._held[MOST_SENT:]
        return some

    def _send(self, some: list[Mapping[str, object]]) -> None:
        body = json.dumps(otlp.document(some, "afserve.node", {"service.instance.id": self._node})).encode()
        kind = {"content-type": "application/json"}
        request = urllib.request.Request(self._url, body, kind)  # noqa: S310 - `afserve up` takes http(s) only
        try:
            with self._opener.open(request, timeout=PATIENCE) as answer:
                answer.read()
        except (OSError, HTTPException) as error:
            self.dropped += len(some)
            if not self._said:
                log.warning("spans cannot be sent (%s); this is said once", type(error).__name__)
            self._said = True
