"""Spans as a collector gets them: below the caller's, with the phases of each sequence, and never in the way."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from afserve.engine.scheduling.request import Origin
from afserve.errors import ConfigError
from afserve.launch.processes.http import settings_for
from afserve.server.http.settings import Listening, ServerSettings
from afserve.server.metrics import spans
from afserve.server.metrics.spans import NOWHERE, Spans

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector(monkeypatch):
    """(its URL, the spans that came)."""
    monkeypatch.setattr(spans, "SEND_SECONDS", 0.05)
    came = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/traces"
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            came.extend(body["resourceSpans"][0]["scopeSpans"][0]["spans"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", came
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_a_request_and_its_sequences(make_backend, run_server, collector):
    url, came = collector
    with run_server(make_backend(), otlp_endpoint=url) as server:
        ask = {"prompt": "a-secret-prompt", "n": 2}
        reply = httpx.post(
            f"{server.url}/v1/completions", json=ask, headers={"traceparent": PARENT}, timeout=60
        )
        httpx.post(f"{server.url}/v1/messages", json={"messages": [], "max_tokens": 1}, timeout=60)
        told = [one.origin for one in server.backend.requests]
        off = PARENT[:-2] + "00"
        httpx.get(f"{server.url}/v1/models", headers={"traceparent": off}, timeout=60)
        until = time.monotonic() + 60
        while len(came) < 8:
            assert time.monotonic() < until, came
            time.sleep(0.05)
    names = sorted(span["name"] for span in came)
    wanted = ["POST /v1/completions", "POST /v1/messages", *["decode", "prefill", "queue"] * 2]
    assert names == sorted(wanted)
    request = next(span for span in came if span["name"] == "POST /v1/completions")
    assert (request["traceId"], request["parentSpanId"]) == tuple(PARENT.split("-")[1:3])
    said = {one["key"]: next(iter(one["value"].values())) for one in request["attributes"]}
    assert said == {"http.response.status_code": "200", "afserve.request_id": reply.headers["x-request-id"]}
    below = f"00-{request['traceId']}-{request['spanId']}-01"
    assert told == [Origin(reply.headers["x-request-id"], below)] * 2
    for span in came:
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        if span["kind"] == 1:
            assert (span["traceId"], span["parentSpanId"]) == (request["traceId"], request["spanId"])
    other = next(span for span in came if span["name"] == "POST /v1/messages")
    assert other["traceId"] != request["traceId"] and "parentSpanId" not in other
    assert "secret" not in json.dumps(came)


def test_a_collector_that_is_not_there_costs_spans_only(make_backend, run_server, caplog, monkeypatch):
    monkeypatch.setattr(spans, "SEND_SECONDS", 0.01)
    with run_server(make_backend(), otlp_endpoint="http://127.0.0.1:9") as server:
        for _ in range(3):
            assert (
                httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=60).status_code
                == 200
            )
        until = time.monotonic() + 60
        while not server.app.state.service.spans.dropped:
            assert time.monotonic() < until
            time.sleep(0.02)
    assert caplog.text.count("spans cannot be sent") == 1


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(spans, "MOST_HELD", 5)

    async def fill():
        held = Spans("http://none", httpx.MockTransport(lambda request: httpx.Response(200)))
        for _ in range(8):
            held.begin_span(None).end_span("x", 0.0, {}, failed=True)
        assert held.dropped == 3
        await held.send_rest()
        assert held.dropped == 3 and not held._held

    asyncio.run(fill())


def test_close_sends_what_waits_and_what_is_on_its_way(monkeypatch):
    monkeypatch.setattr(spans, "SEND_SECONDS", 3600.0)
    came = []

    async def slowly(request):
        await asyncio.sleep(0.05)
        came.extend(json.loads(request.content)["resourceSpans"][0]["scopeSpans"][0]["spans"])
        return httpx.Response(200)

    async def play():
        held = Spans("http://none", httpx.MockTransport(slowly))
        for _ in range(spans.MOST_SENT + 1):
            held.begin_span(None).end_span("x", 0.0, {}, failed=False)
        await asyncio.sleep(0)
        await held.send_rest()
        assert held.dropped == 0 and len(came) == spans.MOST_SENT + 1
        held.begin_span(None).end_span("late", 0.0, {}, failed=False)
        assert held.dropped == 1

    asyncio.run(play())


def test_close_waits_for_no_collector_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(spans, "CLOSE_SECONDS", 0.05)

    async def never(request):
        await asyncio.Event().wait()

    async def play():
        held = Spans("http://none", httpx.MockTransport(never))
        held.begin_span(None).end_span("x", 0.0, {}, failed=False)
        await asyncio.wait_for(held.send_rest(), 60)
        assert held.dropped == 1

    asyncio.run(play())


def test_who_is_recorded():
    held = Spans("http://none")
    assert Spans().begin_span(PARENT) is NOWHERE and held.begin_span(PARENT[:-2] + "00") is NOWHERE
    for odd in (None, "x", PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32)):
        assert held.begin_span(odd).parent == ""
    assert held.begin_span(PARENT).parent == "b7ad6b7169203331"
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        settings_for(Listening(), ServerSettings(otlp_endpoint="127.0.0.1:4318"))
