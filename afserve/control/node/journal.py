"""What an attention node tells of each request once it has ended here: a line of its log, and a span.

Both carry the name that the request has at its gateway, so that one can be found by the other. Costs nothing per token.
"""

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from afserve.adviser import Adviser
from afserve.clock import Clock, WallClock
from afserve.engine.scheduling.request import Origin
from afserve.tracing import otlp

LEFT = "left"  # its gateway wants it no more, or has given it to another node
log = logging.getLogger("afserve.node")
Put = Callable[[Mapping[str, object]], None]


@dataclass(slots=True)
class Stay:
    """One request at this node. Times are Unix seconds; `answered` is 0 until there is a token."""

    origin: Origin
    prompt: int
    began: float
    answered: float = 0.0
    queued: float = 0.0
    cached: int = 0


class Journal:
    """`put` takes spans; None where there is no collector."""

    def __init__(self, node: str = "", put: Put | None = None, clock: Clock | None = None) -> None:
        self._node, self._put = node, put
        self._clock = clock or WallClock()
        self._advice = Adviser("telling what requests did here")

    def begin(self, origin: Origin, prompt: int) -> Stay:
        return Stay(origin, prompt, self._clock.now())

    def answered(self, stay: Stay, queued: float, cached: int) -> None:
        """Its first token; it was `queued` for so many seconds."""
        stay.answered, stay.queued, stay.cached = self._clock.now(), queued, cached

    def ended(self, stay: Stay, tokens: int, reason: str, *, failed: bool = False) -> None:
        """With `tokens` of its answer drawn here."""
        told = partial(self._tell, stay, tokens, reason, failed=failed)
        self._advice.ask(time.monotonic(), told, None)

    def _tell(self, stay: Stay, tokens: int, reason: str, *, failed: bool) -> None:
        traced = self._put is not None and stay.origin.traceparent
        if not traced and not log.isEnabledFor(logging.INFO):
            return
        now = self._clock.now()
        facts = _facts(stay, now, tokens, reason)
        said = {"node": self._node, **facts}
        log.info(
            "%d tokens after %d of prompt: %s",
            tokens,
            stay.prompt,
            reason,
            extra={"request_id": stay.origin.request_id, "fields": said},
        )
        if traced:
            self._draw(stay, now, {"afserve.node": self._node, **_named(facts)}, failed=failed)

    def _draw(self, stay: Stay, now: float, said: otlp.Attributes, *, failed: bool) -> None:
        assert self._put is not None
        _, trace, parent, _ = stay.origin.traceparent.split("-")
        ids = otlp.SpanIds(trace, secrets.token_hex(8), parent)
        if stay.origin.request_id:
            said = {**said, "afserve.request_id": stay.origin.request_id}
        self._put(
            otlp.span(ids, f"attention {self._node}", stay.began, max(now, stay.began), said, failed=failed)
        )


def _facts(stay: Stay, now: float, tokens: int, reason: str) -> dict[str, str | int | float]:
    """Seconds of what it did; of one that got no token all of it is waiting."""
    answered = stay.answered or now
    queued = (
        min(stay.queued, max(0.0, answered - stay.began)) if stay.answered else max(0.0, now - stay.began)
    )
    return {
        "prompt_tokens": stay.prompt,
        "cached_tokens": stay.cached,
        "tokens": tokens,
        "queue_seconds": round(queued, 6),
        "prefill_seconds": round(max(0.0, answered - stay.began - queued), 6),
        "decode_seconds": round(max(0.0, now - answered), 6),
        "reason": reason,
    }


def _named(facts: otlp.Attributes) -> dict[str, str | int | float]:
    return {f"afserve.{name}": value for name, value in facts.items()}
