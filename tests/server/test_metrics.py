"""/metrics is valid exposition text, says what happened, and speaks vllm's names too."""

import asyncio
import math

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from afserve.cli.status import phase_lines
from afserve.clock import FakeClock
from afserve.control.wire.load_values import ClassCounts
from afserve.control.wire.view_values import ClusterView, NodeView
from afserve.engine.scheduling.request import TokenEvent
from afserve.engine.stats import AttentionStats
from afserve.metrics import INTER_TOKEN_BUCKETS, Counter, Histogram, MetricFamily, gauge, render
from afserve.server.metrics.goodput import Times
from afserve.server.metrics.nodes import counted, queues
from afserve.server.metrics.observe import HttpMetrics, ServerMetrics, _cluster, exposition


def parse(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = list(text_string_to_metric_families(text))
    assert len({f.name for f in families}) == len(families)
    return {
        (
            s.name,
            tuple(sorted((k, v) for k, v in s.labels.items() if k not in ("model_name", "engine"))),
        ): s.value
        for f in families
        for s in f.samples
    }


def test_over_http(http, server, nodes):
    server.backend.nodes = nodes
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 32})
    reply = http.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    seen = parse(reply.text)
    for prefix in ("afserve_", "vllm:"):
        assert seen[prefix + "num_requests_running", ()] == 2
        assert seen[prefix + "num_requests_waiting", ()] == 3, "on nodes, and for one"
        assert seen[prefix + "kv_cache_usage_perc", ()] == 0.25
        assert seen[prefix + "prefix_cache_queries_total", ()] == 10
        assert seen[prefix + "prefix_cache_hits_total", ()] == 4
        assert seen[prefix + "generation_tokens_total", ()] > 0
        assert seen[prefix + "prompt_tokens_total", ()] > 0
        assert seen[prefix + "time_to_first_token_seconds_count", ()] >= 1
        assert seen[prefix + "inter_token_latency_seconds_bucket", (("le", "0.002"),)] >= 0
        assert seen[prefix + "e2e_request_latency_seconds_count", ()] >= 1
        for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "prompt_tokens"):
            assert seen[f"{prefix}request_{name}_count", ()] >= 1
        assert seen[prefix + "cache_config_info", (("num_gpu_blocks", "100"),)] == 1
        assert seen[prefix + "request_generation_tokens_sum", ()] >= 1
        assert seen[prefix + "request_success_total", (("finished_reason", "stop"),)] >= 1
    assert 'vllm:num_requests_running{model_name="tiny",engine="0"} 2' in reply.text
    assert seen["afserve_expert_rows_total", (("expert", "0"), ("layer", "0"))] == 6
    assert seen["afserve_requests_moved_total", (("cause", "lost"),)] == 3
    assert seen["afserve_requests_refused_total", (("reason", "ttft"),)] == 5
    assert seen["afserve_nodes_lost_total", (("cause", "silent"), ("role", "attention"))] == 2
    assert seen["afserve_expert_bytes_reloaded_total", ()] == 4096
    assert seen["afserve_rows_resent_total", ()] == 12
    assert seen["afserve_stall_seconds_total", (("cause", "moved"),)] == 0.5
    assert seen["afserve_nodes_wanted", (("role", "expert"),)] == 2
    assert seen["afserve_nodes_serving", (("role", "expert"),)] == 1
    assert seen["afserve_layer_expert_skew", (("layer", "0"),)] == 1.5
    assert seen["afserve_expert_node_rows_total", (("node", "expert-0"),)] == 40
    for name in ("dispatches", "busy_seconds", "parked_seconds", "under_way_seconds"):
        assert (f"afserve_attention_node_{name}_total", (("node", "attention-0"),)) in seen
    assert seen["afserve_node_up", (("node", "attention-0"), ("role", "attention"), ("state", "ready"))] == 1
    assert seen["afserve_http_responses_total", (("route", "/v1/completions"), ("status", "200"))] >= 1


def test_times_of_a_request():
    clock = FakeClock()
    metrics = ServerMetrics(clock)
    timer = metrics.timer(clock.now(), 12, 64)
    for seconds, tokens in ((0.03, 1), (0.0035, 1), (0.006, 4)):
        clock.advance(seconds)
        timer.saw(TokenEvent(1, (5,) * tokens, cached_tokens=3, queued=0.01))
    timer.end_timing("stop")
    seen = {s.suffix + str(dict(s.labels).get("le", "")): s.value for s in metrics.inter_token.samples()}
    assert seen["_count"] == 5 and seen["_sum"] == pytest.approx(0.0095)
    assert seen["_bucket0.002"] == 4 and seen["_bucket0.004"] == 5
    assert metrics.first_token.observations == 1 and metrics.cached_tokens.total_of() == 3
    assert metrics.generated_tokens.total_of() == 6

    def total(histogram):
        return next(s.value for s in histogram.samples() if s.suffix == "_sum")

    assert total(metrics.queue) == 0.01 and total(metrics.prefill) == pytest.approx(0.02)
    assert total(metrics.decode) == pytest.approx(0.0095)
    assert (total(metrics.asked), total(metrics.answered), total(metrics.allowed)) == (12, 6, 64)


def sequence(metrics, first, *rest, **times):
    timer = metrics.timer(metrics.clock.now(), 100, 64, Times(**times))
    metrics.clock.advance(first)
    timer.saw(TokenEvent(1, (5,)))
    for seconds in rest:
        metrics.clock.advance(seconds)
        timer.saw(TokenEvent(1, (5,)))
    timer.end_timing("length")


def test_goodput_by_phase():
    """Who asks for nothing is judged by the server's own times, and by none where it has none."""
    drawn = {}
    metrics = ServerMetrics(FakeClock(), Times(ttft=0.5), drawn.__setitem__)
    sequence(metrics, 0.25, 0.1, 0.1)
    assert drawn == {"prefill, sequences by time": {"on_time": 1, "late": 0}}
    assert metrics.goodput.figures() == {"prefill": {"on_time": 1, "late": 0, "tokens": 100}}
    sequence(metrics, 0.75, 0.1, 0.3, tpot=0.25)
    sequence(metrics, 0.75, 0.1, 0.3, ttft=1.0, tpot=0.125)
    sequence(metrics, 0.25, tpot=0.001)  # of one token there is no rest
    assert metrics.goodput.figures() == {
        "prefill": {"on_time": 3, "late": 1, "tokens": 300},
        "decode": {"on_time": 1, "late": 1, "tokens": 3},
    }
    timer = metrics.timer(metrics.clock.now(), 100, 64)
    metrics.clock.advance(9.0)
    timer.end_timing("abort")
    assert metrics.goodput.figures()["prefill"]["late"] == 2, "it never came"
    assert drawn == {
        "prefill, sequences by time": {"on_time": 3, "late": 2},
        "decode, sequences by time": {"on_time": 1, "late": 1},
    }
    seen = parse(render(metrics.goodput.families()))
    assert seen["afserve_phase_sequences_total", (("on_time", "no"), ("phase", "prefill"))] == 2
    assert seen["afserve_phase_goodput_tokens_total", (("phase", "prefill"),)] == 300
    plain = ServerMetrics(FakeClock())
    sequence(plain, 5.0, 5.0)
    assert plain.goodput.figures() == {}


def test_whoever_sizes_pools_is_told_of_each_class():
    metrics = ServerMetrics(FakeClock(), Times(ttft=0.5))
    sequence(metrics, 0.25, 0.1, 0.1, service_class="chat", tpot=0.2)
    sequence(metrics, 0.75, 0.1, 0.5, service_class="chat", tpot=0.2)
    sequence(metrics, 0.25, 0.1, service_class="bulk")
    sequence(metrics, 0.25, 0.1)
    load = metrics.load()
    assert load.total.came == 4 and load.total.first_late == 1
    assert load.classes == {
        "chat": ClassCounts(2, first=2, first_late=1, rest=2, rest_late=1, goodput_tokens=3),
        "bulk": ClassCounts(1, first=1),
    }


def test_a_client_that_leaves_in_time_is_not_late():
    metrics = ServerMetrics(FakeClock(), Times(ttft=0.5))
    timer = metrics.timer(metrics.clock.now(), 100, 64)
    metrics.clock.advance(0.1)
    timer.end_timing("abort")
    assert metrics.goodput.figures() == {}


def test_a_node_names_its_instruction_set():
    stats = AttentionStats()
    nodes = (
        NodeView("attention-0", "attention", "ready", 1, 0, 0, stats, isa="avx2"),
        NodeView("attention-1", "attention", "ready", 1, 0, 0, stats),
    )
    seen = parse(render(_cluster(ClusterView(0, nodes))))
    labels = (("isa", "avx2"), ("node", "attention-0"), ("role", "attention"))
    assert [key for key in seen if key[0] == "afserve_node_info"] == [("afserve_node_info", labels)]


def test_queues_by_phase():
    def node(index, phase, **counts):
        return NodeView(f"attention-{index}", "attention", "ready", 1, 0, 0, AttentionStats(**counts), phase)

    nodes = (
        node(0, "prefill", running=2, waiting=1, queued_tokens=700),
        node(1, "decode", running=5),
        node(2, "decode", running=4, waiting=3),
        NodeView("gateway-0", "gateway", "ready", 1, 0, 0, None),
    )
    assert queues(nodes) == {
        "decode": {"nodes": 2, "running": 9, "waiting": 3, "queued_tokens": 0},
        "prefill": {"nodes": 1, "running": 2, "waiting": 1, "queued_tokens": 700},
    }
    seen = parse(render(counted(nodes)))
    assert seen["afserve_phase_queued_tokens", (("phase", "prefill"),)] == 700
    goodput = {"prefill": {"on_time": 19, "late": 1, "tokens": 1900}}
    assert phase_lines({"phases": queues(nodes), "goodput": goodput}) == [
        "decode: 2 nodes, 9 running, 3 waiting, 0 prompt tokens queued",
        "prefill: 1 node, 2 running, 1 waiting, 700 prompt tokens queued",
        "prefill on time: 95.0% of 20 first tokens, 1,900 tokens",
    ]
    assert phase_lines({"phases": {"both": queues(nodes)["prefill"]}, "goodput": {}}) == []


def test_a_server_with_times_tells_its_goodput(make_backend, run_server):
    with run_server(make_backend(), ttft=60.0) as server:
        asked = {"prompt": "x", "tpot": 60}
        assert httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).status_code == 200
        status = httpx.get(f"{server.url}/status", timeout=60).json()
    assert status["goodput"]["prefill"]["on_time"] == 1 and status["goodput"]["decode"]["late"] == 0


def test_many_experts_are_drawn_per_layer_only(make_backend):
    backend = make_backend()
    backend.nodes = (NodeView("a", "attention", "ready", 1, 0, 0, AttentionStats()),) * 2
    backend.routed = (tuple(range(256)),) * 58
    text = asyncio.run(exposition(HttpMetrics(), [(backend, ServerMetrics())], 0, 0))
    seen = parse(text)
    assert seen["afserve_layer_routed_rows_total", (("layer", "57"),)] == sum(range(256))
    assert "afserve_expert_rows" not in text and len(text) < 100_000


def test_render_escapes_and_counts():
    counter = Counter("path")
    counter.add(2, 'a"b\\c\nd')
    histogram = Histogram([1, 2])
    for value in (0.5, 1, 1.5, 9):
        histogram.observe(value)
    text = render(
        [
            MetricFamily(("x",), "counter", "help \\ me\nnow", counter.samples()),
            MetricFamily(("h", "i"), "histogram", "h", histogram.samples()),
            gauge(("g",), "g", [((), 0.1)]),
        ]
    )
    seen = parse(text)
    assert seen["x_total", (("path", 'a"b\\c\nd'),)] == 2
    assert [seen["i_bucket", (("le", le),)] for le in ("1", "2", "+Inf")] == [2, 3, 4]
    assert seen["h_sum", ()] == 12 and seen["g", ()] == 0.1


def test_buckets_begin_at_two_milliseconds():
    assert INTER_TOKEN_BUCKETS[0] == 0.002 and all(math.isfinite(b) for b in INTER_TOKEN_BUCKETS)


def test_a_client_that_leaves_counts_as_aborted(http, server):
    server.backend.hold_at = 2
    with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as reply:
        next(reply.iter_bytes())
    assert server.backend.ended.wait(20)
    seen = parse(http.get("/metrics").text)
    assert seen["vllm:request_success_total", (("finished_reason", "abort"),)] >= 1
