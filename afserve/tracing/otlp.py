"""Spans as OpenTelemetry's collectors take them: OTLP over HTTP, as JSON. Sends nothing itself.

Not with OpenTelemetry's own SDK, as an extra either: its exporter for HTTP brings 13 packages of 13 MB and a thread; a
span takes 106 us (ours 6, measured with 1.45 on a loaded core), which a request pays four times, and nodes where steps
are. What a request's span has, and what is dropped, would stay to be written here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afserve import __version__

Attributes = Mapping[str, str | int | float]
INTERNAL, SERVER = 1, 2  # kinds of spans
_FAILED = 2  # a status code

# Whoever sends them: in batches, a bounded number of which waits.
SEND_SECONDS = 2.0
MOST_HELD = 8192  # spans; what comes while so many wait is dropped, and counted
MOST_SENT = 512  # at once
PATIENCE = 10.0  # seconds for a collector to answer


@dataclass(frozen=True, slots=True)
class SpanIds:
    """Which trace, which span of it, and below which; hexadecimal. `parent` is empty where there is none."""

    trace: str
    own: str
    parent: str = ""


def traces_url(endpoint: str) -> str:
    return endpoint.rstrip("/") + "/v1/traces"


def span(
    ids: SpanIds,
    name: str,
    began: float,
    ended: float,
    attributes: Attributes,
    kind: int = INTERNAL,
    *,
    failed: bool = False,
) -> dict[str, object]:
    """One span. Times are Unix seconds."""
    drawn: dict[str, object] = {
        "traceId": ids.trace,
        "spanId": ids.own,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(int(began * 1e9)),
        "endTimeUnixNano": str(int(ended * 1e9)),
        "attributes": [_attribute(key, value) for key, value in attributes.items()],
    }
    if ids.parent:
        drawn["parentSpanId"] = ids.parent
    if failed:
        drawn["status"] = {"code": _FAILED}
    return drawn


def document(
    spans: Sequence[Mapping[str, object]], scope: str, about: Attributes | None = None
) -> dict[str, object]:
    """What is posted. `scope` is the part of afserve that they are of, `about` says more of the sender."""
    resource = {"service.name": "afserve", "service.version": __version__, **(about or {})}
    attributes = [_attribute(key, value) for key, value in resource.items()]
    inside = [{"scope": {"name": scope}, "spans": list(spans)}]
    return {"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": inside}]}


def _attribute(key: str, value: str | int | float) -> dict[str, object]:
    if isinstance(value, str):
        return {"key": key, "value": {"stringValue": value}}
    if isinstance(value, int):
        return {"key": key, "value": {"intValue": str(value)}}
    return {"key": key, "value": {"doubleValue": value}}
