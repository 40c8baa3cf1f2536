"""The whole of /metrics: HTTP's counts of one gateway, and what each of its models and their nodes say."""

from collections.abc import Iterator, Sequence

from afserve.clock import Clock, MonotonicClock
from afserve.control.backend import Backend
from afserve.metrics import Counter, Labels, MetricFamily, gauge, render_together
from afserve.server.metrics.observe import ServerMetrics

_ENGINE: Labels = (("engine", "0"),)


class HttpMetrics:
    """What one gateway counts whatever the model. Used from the event loop only."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or MonotonicClock()
        self.responses = Counter("route", "status")
        self.cancelled = Counter("reason")

    def by_class(self) -> dict[str, int]:
        """Responses by the first digit of their status: 2 good ones, 4 refused, 5 failed."""
        found: dict[str, int] = {}
        for sample in self.responses.samples():
            digit = dict(sample.labels)["status"][0]
            found[digit] = found.get(digit, 0) + int(sample.value)
        return found

    def families(self, in_flight: int, connections: int) -> Iterator[MetricFamily]:
        yield gauge(("afserve_http_requests_in_flight",), "Requests being answered.", [((), in_flight)])
        yield gauge(("afserve_http_connections",), "Open connections.", [((), connections)])
        yield MetricFamily(
            ("afserve_http_cancelled",),
            "counter",
            "Requests cancelled because the client left, or did not read.",
            self.cancelled.samples(),
        )
        yield MetricFamily(
            ("afserve_http_responses",), "counter", "Responses by route and status.", self.responses.samples()
        )


async def exposition(
    http: HttpMetrics, models: Sequence[tuple[Backend, ServerMetrics]], in_flight: int, connections: int
) -> str:
    """Every line has its model as a label; what is of no model has one only where there is one model."""
    named: list[Labels] = [(("model_name", backend.model.name),) for backend, _ in models]
    groups = [(named[0] if len(named) == 1 else (), http.families(in_flight, connections))]
    for labels, (backend, metrics) in zip(named, models, strict=True):
        groups.append((labels, metrics.families(await backend.view())))
    return render_together(groups, _ENGINE)
