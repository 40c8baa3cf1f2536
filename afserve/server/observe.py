"""What /metrics says: the gateway's own measurements and the nodes' statistics, native names and vllm:* aliases.

Counts and draws; knows neither HTTP nor when anything happens beyond the clock it is given.
"""

from collections.abc import Iterator

from afserve.clock import Clock, MonotonicClock
from afserve.control.backend import Backend, ClusterView
from afserve.engine.request import TokenEvent
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.metrics import (
    FIRST_TOKEN_BUCKETS,
    INTER_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    Counter,
    Histogram,
    Labels,
    MetricFamily,
    Sample,
    gauge,
    render,
)
from afserve.server.kv_moves import moved_kv
from afserve.server.kv_tiers import tiers
from afserve.server.losses import losses

# Above this many (layer, expert) pairs only the per-layer figures are drawn: a scrape stays small.
MAX_EXPERT_SERIES = 4096


class ServerMetrics:
    """Everything one gateway counts. Used from the event loop only."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or MonotonicClock()
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.inter_token = Histogram(INTER_TOKEN_BUCKETS)
        self.request = Histogram(REQUEST_BUCKETS)
        self.prompt_tokens = Counter()
        self.cached_tokens = Counter()
        self.generated_tokens = Counter()
        self.finished = Counter("finished_reason")
        self.responses = Counter("route", "status")
        self.cancelled = Counter("reason")

    def timer(self, arrived: float) -> "RequestTimer":
        return RequestTimer(self, arrived)

    async def text(self, backend: Backend, in_flight: int, connections: int) -> str:
        open_now = gauge(("afserve_http_connections",), "Open connections.", [((), connections)])
        families = (*self._own(in_flight), open_now, *_cluster(await backend.view()))
        return render(families, (("model_name", backend.model.name),))

    def _own(self, in_flight: int) -> Iterator[MetricFamily]:
        yield gauge(("afserve_http_requests_in_flight",), "Requests being answered.", [((), in_flight)])
        for name, help, histogram in (
            ("time_to_first_token_seconds", "From the request read to its first token.", self.first_token),
            ("inter_token_latency_seconds", "Between two tokens of one sequence.", self.inter_token),
            ("e2e_request_latency_seconds", "From the request read to its last token.", self.request),
        ):
            yield MetricFamily(_both(name), "histogram", help, histogram.samples())
        for name, help, counter in (
            ("prompt_tokens", "Prompt tokens accepted.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generated_tokens),
            ("request_success", "Sequences that ended, by reason.", self.finished),
        ):
            yield MetricFamily(_both(name), "counter", help, counter.samples())
        cached = self.cached_tokens.samples()
        yield MetricFamily(
            ("afserve_prompt_tokens_cached",), "counter", "Prompt tokens found in the prefix cache.", cached
        )
        yield MetricFamily(
            ("afserve_http_cancelled",),
            "counter",
            "Requests cancelled because the client left, or did not read.",
            self.cancelled.samples(),
        )
        yield MetricFamily(
            ("afserve_http_responses",), "counter", "Responses by route and status.", self.responses.samples()
        )


class RequestTimer:
    """The times of one sequence, from its submission to its last token."""

    def __init__(self, metrics: ServerMetrics, start: float) -> None:
        self._metrics = metrics
        self._start = start
        self._last: float | None = None

    def saw(self, event: TokenEvent) -> None:
        tokens = len(event.token_ids)
        if not tokens:
            return
        metrics, now = self._metrics, self._metrics.clock.now()
        if self._last is None:
            metrics.first_token.observe(now - self._start)
            metrics.cached_tokens.add(event.cached_tokens)
        else:
            metrics.inter_token.observe((now - self._last) / tokens, tokens)
        metrics.generated_tokens.add(tokens)
        self._last = now

    def ended(self, reason: str) -> None:
        self._metrics.finished.add(1, reason)
        self._metrics.request.observe(self._metrics.clock.now() - self._start)


def _both(name: str) -> tuple[str, str]:
    return f"afserve_{name}", f"vllm:{name}"


def _cluster(view: ClusterView) -> Iterator[MetricFamily]:
    attention = [(n.name, n.stats) for n in view.nodes if isinstance(n.stats, AttentionStats)]
    experts = [(n.name, n.stats) for n in view.nodes if isinstance(n.stats, ExpertStats)]
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
        ("afserve_expert_balance",),
        "Fullest expert node over the mean, per MoE layer, over the last seconds.",
        [((("layer", str(layer)),), value) for layer, value in enumerate(view.balance)],
    )
    moved = (Sample(view.moves, (), "_total"),)
    yield MetricFamily(
        ("afserve_expert_moves",), "counter", "Experts moved between nodes while serving.", moved
    )
    yield from _attention([stats for _, stats in attention], view.waiting)
    yield from losses(view)
    yield from _attention_nodes(attention)
    yield from moved_kv(attention)
    yield from tiers(attention)
    yield from _expert_nodes(experts)
    yield from _expert_load(view.routed)


def _attention(nodes: list[AttentionStats], homeless: int) -> Iterator[MetricFamily]:
    blocks = sum(n.kv_blocks for n in nodes)
    use = sum(n.kv_blocks_used for n in nodes) / blocks if blocks else 0.0
    for name, help, value in (
        ("num_requests_running", "Sequences being generated.", sum(n.running for n in nodes)),
        ("num_requests_waiting", "Sequences waiting for a place.", homeless + sum(n.waiting for n in nodes)),
        ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", use),
    ):
        yield gauge(_both(name), help, [((), value)])
    for name, help, total in (
        (
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            sum(n.prefix_queries for n in nodes),
        ),
        ("prefix_cache_hits", "Prompt tokens found there.", sum(n.prefix_hits for n in nodes)),
        ("num_preemptions", "Sequences put back for lack of KV blocks.", sum(n.preemptions for n in nodes)),
    ):
        yield MetricFamily(_both(name), "counter", help, (Sample(total, (), "_total"),))


def _attention_nodes(nodes: list[tuple[str, AttentionStats]]) -> Iterator[MetricFamily]:
    for name, help, values in (
        (
            "dispatches",
            "Layers of micro-batches sent to expert nodes.",
            [(n, s.dispatches) for n, s in nodes],
        ),
        ("busy_seconds", "Time spent computing.", [(n, s.busy_seconds) for n, s in nodes]),
        ("parked_seconds", "Time spent only waiting for answers.", [(n, s.parked_seconds) for n, s in nodes]),
        (
            "under_way_seconds",
            "Time from dispatch to answer, summed over dispatches.",
            [(n, s.under_way_seconds) for n, s in nodes],
        ),
    ):
        samples = tuple(Sample(value, (("node", node),), "_total") for node, value in values)
        yield MetricFamily((f"afserve_attention_node_{name}",), "counter", help, samples)


def _expert_nodes(nodes: list[tuple[str, ExpertStats]]) -> Iterator[MetricFamily]:
    for name, help, values in (
        ("rows", "Rows computed.", [(n, s.rows) for n, s in nodes]),
        ("messages", "Dispatches answered.", [(n, s.messages) for n, s in nodes]),
        ("calls", "Grouped computations.", [(n, s.calls) for n, s in nodes]),
        ("busy_seconds", "Time spent computing.", [(n, s.busy_seconds) for n, s in nodes]),
        ("hold_seconds", "Time rows were held to be grouped.", [(n, s.hold_seconds) for n, s in nodes]),
    ):
        samples = tuple(Sample(value, (("node", node),), "_total") for node, value in values)
        yield MetricFamily((f"afserve_expert_node_{name}",), "counter", help, samples)


def _expert_load(rows: tuple[tuple[int, ...], ...]) -> Iterator[MetricFamily]:
    """Per layer: the total and max/mean of the routed rows; per expert as well while that is few."""
    totals = tuple(Sample(sum(layer), _layer(l), "_total") for l, layer in enumerate(rows))
    yield MetricFamily(("afserve_layer_routed_rows",), "counter", "Rows routed, per MoE layer.", totals)
    skew = [(_layer(l), max(layer) * len(layer) / sum(layer)) for l, layer in enumerate(rows) if sum(layer)]
    yield gauge(
        ("afserve_layer_expert_skew",), "Rows of the busiest expert over the mean, per MoE layer.", skew
    )
    if sum(len(layer) for layer in rows) <= MAX_EXPERT_SERIES:
        samples = tuple(
            Sample(count, (*_layer(l), ("expert", str(e))), "_total")
            for l, layer in enumerate(rows)
            for e, count in enumerate(layer)
        )
        yield MetricFamily(
            ("afserve_expert_rows",), "counter", "Rows routed, per MoE layer and expert.", samples
        )


def _layer(index: int) -> Labels:
    return (("layer", str(index)),)
