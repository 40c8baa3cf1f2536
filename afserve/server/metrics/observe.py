"""All of /metrics: what one gateway counts and measures, of HTTP and of each model, and what nodes say, as vllm too.

Counts and draws; knows neither HTTP nor when anything happens beyond the clock it is given.
"""

from collections.abc import Iterator, Sequence

from afserve.clock import Clock, MonotonicClock
from afserve.control.backend import Backend
from afserve.control.wire.load_values import GatewayLoad, LoadCounts
from afserve.control.wire.view_values import ClusterView
from afserve.engine.scheduling.request import TokenEvent
from afserve.engine.stats import AttentionStats
from afserve.metrics import (
    FIRST_TOKEN_BUCKETS,
    INTER_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
    Counter,
    Histogram,
    Labels,
    MetricFamily,
    gauge,
    render_together,
    totals,
)
from afserve.server.metrics.goodput import ANY_TIME, DECODE, PREFILL, DrawCounts, GoodputMeter, Times
from afserve.server.metrics.key_meter import KeyMeter
from afserve.server.metrics.nodes import both, counted, losses, piloted

# Above this many (layer, expert) pairs only the per-layer figures are drawn: a scrape stays small.
MAX_EXPERT_SERIES = 4096
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
        cancelled = "Requests cancelled because the client left, or did not read."
        yield self.cancelled.family(("afserve_http_cancelled",), cancelled)
        yield self.responses.family(("afserve_http_responses",), "Responses by route and status.")


class ServerMetrics:
    """What one gateway counts of one model. Used from the event loop only."""

    def __init__(
        self, clock: Clock | None = None, times: Times = ANY_TIME, draw: DrawCounts | None = None
    ) -> None:
        """`times` are the server's own. `draw` is told the goodput whenever it changes."""
        self.clock = clock or MonotonicClock()
        self.times, self.goodput, self.keys = times, GoodputMeter(draw), KeyMeter()
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.inter_token = Histogram(INTER_TOKEN_BUCKETS)
        self.request = Histogram(REQUEST_BUCKETS)
        self.queue, self.prefill, self.decode = (Histogram(REQUEST_BUCKETS) for _ in range(3))
        self.asked, self.answered, self.allowed = (Histogram(TOKEN_BUCKETS) for _ in range(3))
        self.prompt_tokens = Counter()
        self.cached_tokens = Counter()
        self.generated_tokens = Counter()
        self.finished = Counter("finished_reason")

    def timer(
        self, arrived: float, prompt_tokens: int, max_tokens: int, times: Times = ANY_TIME
    ) -> "RequestTimer":
        """`times` are those that the request asks for."""
        self.asked.observe(prompt_tokens)
        self.goodput.came(times)
        self.allowed.observe(max_tokens)
        return RequestTimer(self, arrived, prompt_tokens, times.or_else(self.times))

    def load(self) -> GatewayLoad:
        """What whoever sizes the pools is told."""
        judged = {phase: of["late"] for phase, of in self.goodput.figures().items()}
        answers, answer_tokens = self.decode.observations, int(self.answered.observed_sum)
        total = LoadCounts(
            came=self.asked.observations,
            prompt_tokens=int(self.asked.observed_sum),
            found_tokens=int(self.cached_tokens.total_of()),
            first=self.first_token.observations,
            first_late=judged.get(PREFILL, 0),
            ended=self.answered.observations,
            answer_tokens=answer_tokens,
            rest_tokens=max(0, answer_tokens - answers),
            rest_late=judged.get(DECODE, 0),
            first_seconds=self.first_token.observed_sum,
            rest_seconds=self.decode.observed_sum,
        )
        return GatewayLoad(total, self.goodput.class_counts())

    def families(self, view: ClusterView) -> Iterator[MetricFamily]:
        """Of the model, and of the nodes that compute it."""
        yield from self._own()
        yield from _cluster(view)

    def _own(self) -> Iterator[MetricFamily]:
        for name, help, histogram in (
            ("time_to_first_token_seconds", "From the request read to its first token.", self.first_token),
            ("inter_token_latency_seconds", "Between two tokens of one sequence.", self.inter_token),
            ("e2e_request_latency_seconds", "From the request read to its last token.", self.request),
            ("request_queue_time_seconds", "From its arrival at a node to its first step.", self.queue),
            ("request_prefill_time_seconds", "From the end of its queue to its first token.", self.prefill),
            ("request_decode_time_seconds", "From its first token to its last.", self.decode),
            ("request_prompt_tokens", "Prompt tokens of a sequence.", self.asked),
            ("request_generation_tokens", "Tokens generated for a sequence.", self.answered),
            ("request_params_max_tokens", "The most tokens that a sequence may get.", self.allowed),
        ):
            yield MetricFamily(both(name), "histogram", help, histogram.samples())
        for name, help, counter in (
            ("prompt_tokens", "Prompt tokens accepted.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generated_tokens),
            ("request_success", "Sequences that ended, by reason.", self.finished),
        ):
            yield counter.family(both(name), help)
        cached = "Prompt tokens found in the prefix cache."
        yield self.cached_tokens.family(("afserve_prompt_tokens_cached",), cached)
        yield from self.goodput.families()
        yield from self.keys.families()


class RequestTimer:
    """The times of one sequence, from its submission to its last token."""

    __slots__ = ("_first", "_last", "_metrics", "_prompt_tokens", "_queued", "_start", "_times", "_tokens")

    def __init__(self, metrics: ServerMetrics, start: float, prompt_tokens: int, times: Times) -> None:
        self._metrics, self._prompt_tokens, self._times = metrics, prompt_tokens, times
        self._start = start
        self._first = 0.0
        self._queued = 0.0
        self._last: float | None = None
        self._tokens = 0

    def saw(self, event: TokenEvent) -> None:
        tokens = len(event.token_ids)
        if not tokens:
            return
        metrics, now = self._metrics, self._metrics.clock.now()
        if self._last is None:
            metrics.first_token.observe(now - self._start)
            metrics.goodput.first(self._times, self._prompt_tokens, now - self._start)
            self._queued = min(event.queued, now - self._start)
            metrics.queue.observe(event.queued)
            metrics.prefill.observe(max(0.0, now - self._start - event.queued))
            metrics.cached_tokens.add(event.cached_tokens)
            self._first = now
        else:
            metrics.inter_token.observe((now - self._last) / tokens, tokens)
        metrics.generated_tokens.add(tokens)
        self._last, self._tokens = now, self._tokens + tokens

    def phases(self) -> dict[str, float]:
        """Seconds of each, once it has ended; without a token all of it was queue."""
        now = self._metrics.clock.now()
        if self._last is None:
            return {"queue": now - self._start}
        first = self._first - self._start
        return {"queue": self._queued, "prefill": first - self._queued, "decode": now - self._first}

    def attributes(self, reason: str) -> dict[str, str | int]:
        return {"gen_ai.usage.output_tokens": self._tokens, "gen_ai.response.finish_reasons": reason}

    def end_timing(self, reason: str) -> None:
        metrics = self._metrics
        metrics.finished.add(1, reason)
        metrics.request.observe(metrics.clock.now() - self._start)
        metrics.answered.observe(self._tokens)
        if self._last is not None:
            metrics.decode.observe(self._last - self._first)
            metrics.goodput.rest(self._times, self._tokens, self._last - self._first)
        else:
            metrics.goodput.never(self._times, metrics.clock.now() - self._start)


def _cluster(view: ClusterView) -> Iterator[MetricFamily]:
    yield gauge(("afserve_placement_epoch",), "Version of the expert placement.", [((), view.epoch)])
    yield gauge(
        ("afserve_node_up",),
        "1 for a member in its normal state.",
        [((("node", n.name), ("role", n.role), ("state", n.state)), 1) for n in view.nodes],
    )
    yield gauge(
        ("afserve_node_resident_bytes",),
        "Resident memory of a node.",
        [((("node", n.name),), n.resident_bytes) for n in view.nodes],
    )
    yield gauge(
        ("afserve_node_info",),
        "1 for each node; isa: the instruction set of its kernels, on a CPU.",
        [((("node", n.name), ("role", n.role), ("isa", n.isa)), 1) for n in view.nodes if n.isa],
    )
    yield gauge(
        ("afserve_expert_balance",),
        "Fullest expert node over the mean, per MoE layer, over the last seconds.",
        [((("layer", str(layer)),), value) for layer, value in enumerate(view.balance)],
    )
    yield totals("afserve_expert_moves", "Experts moved between nodes while serving.", [((), view.moves)])
    yield from _cache([node.stats for node in view.nodes if isinstance(node.stats, AttentionStats)])
    yield from losses(view)
    yield from piloted(view.pilot)
    yield from counted(view.nodes, {"num_requests_waiting": view.waiting})
    yield from _expert_load(view.routed)


def _cache(nodes: list[AttentionStats]) -> Iterator[MetricFamily]:
    blocks = sum(n.kv_blocks for n in nodes)
    use = sum(n.kv_blocks_used for n in nodes) / blocks if blocks else 0.0
    yield gauge(both("kv_cache_usage_perc"), "Share of KV blocks in use, 0 to 1.", [((), use)])
    yield gauge(
        both("cache_config_info"),
        "KV blocks of all attention nodes, as labels.",
        [((("num_gpu_blocks", str(blocks)),), 1)],
    )


def _expert_load(rows: tuple[tuple[int, ...], ...]) -> Iterator[MetricFamily]:
    """Per layer: the total and max/mean of the routed rows; per expert as well while that is few."""
    routed = [(_layer(l), sum(layer)) for l, layer in enumerate(rows)]
    yield totals("afserve_layer_routed_rows", "Rows routed, per MoE layer.", routed)
    skew = [(_layer(l), max(layer) * len(layer) / sum(layer)) for l, layer in enumerate(rows) if sum(layer)]
    yield gauge(
        ("afserve_layer_expert_skew",), "Rows of the busiest expert over the mean, per MoE layer.", skew
    )
    if sum(len(layer) for layer in rows) <= MAX_EXPERT_SERIES:
        by_expert = [
            ((*_layer(l), ("expert", str(e))), count)
            for l, layer in enumerate(rows)
            for e, count in enumerate(layer)
        ]
        yield totals("afserve_expert_rows", "Rows routed, per MoE layer and expert.", by_expert)


def _layer(index: int) -> Labels:
    return (("layer", str(index)),)


async def exposition(
    http: HttpMetrics, models: Sequence[tuple[Backend, ServerMetrics]], in_flight: int, connections: int
) -> str:
    """Every line has its model as a label; what is of no model has one only where there is one model."""
    named: list[Labels] = [(("model_name", backend.model.name),) for backend, _ in models]
    groups = [(named[0] if len(named) == 1 else (), http.families(in_flight, connections))]
    for labels, (backend, metrics) in zip(named, models, strict=True):
        groups.append((labels, metrics.families(await backend.view())))
    return render_together(groups, _ENGINE)
