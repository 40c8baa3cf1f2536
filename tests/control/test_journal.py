"""What attention nodes tell of requests that ended there: a line and a span each, sent beside the work."""

import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from afserve.clock import FakeClock
from afserve.control.node import spans
from afserve.control.node.journal import Journal
from afserve.control.node.kept import KeptRequests
from afserve.control.node.spans import NodeSpans
from afserve.control.node.work_spans import WorkSpans
from afserve.control.wire.keeping import Keep
from afserve.engine.scheduling.request import GenerationRequest, Origin, SamplingParams, TokenEvent
from afserve.engine.stats import ExpertStats
from afserve.errors import OverloadedError
from afserve.logs import JsonLines

TRACE, PARENT = "ab" * 16, "cd" * 8
SAMPLED = Origin("my-id", f"00-{TRACE}-{PARENT}-01")


@pytest.fixture
def drawn():
    return []


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def kept(clock, drawn):
    return KeptRequests(5.0, FakeClock(), Journal("attention-3", drawn.append, clock))


def asked(number=7, origin=SAMPLED, **more):
    return GenerationRequest(number, (1, 2, 3), SamplingParams(max_tokens=9), origin=origin, **more)


def said(span):
    return {
        one["key"].removeprefix("afserve."): next(iter(one["value"].values())) for one in span["attributes"]
    }


def test_a_request_is_one_span_below_its_gateways_and_one_line(kept, clock, drawn, caplog):
    caplog.set_level(logging.INFO, "afserve.node")
    began = clock.now()
    kept.open(asked(), 0)
    clock.advance(1.0)
    kept.add(TokenEvent(7, (4,), queued=0.25, cached_tokens=2))
    clock.advance(2.0)
    kept.add(TokenEvent(7, (5, 6), "length"))
    kept.close(7)
    (span,) = drawn
    assert (span["traceId"], span["parentSpanId"], span["name"]) == (TRACE, PARENT, "attention attention-3")
    assert int(span["startTimeUnixNano"]) == int(began * 1e9)
    assert int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"]) == 3_000_000_000
    facts = said(span)
    assert facts == {
        "node": "attention-3", "request_id": "my-id", "prompt_tokens": "3", "cached_tokens": "2", "tokens": "3",
        "queue_seconds": 0.25, "prefill_seconds": 0.75, "decode_seconds": 2.0, "reason": "length",
    }  # fmt: skip
    (record,) = caplog.records
    line = json.loads(JsonLines().format(record))
    assert line["request_id"] == "my-id" and line["node"] == "attention-3" and line["decode_seconds"] == 2.0


def test_every_end_is_told_once(kept, drawn):
    for number in range(4):
        kept.open(asked(number, generated=(9,)), 0, Keep("id", 0, 1, 20.0, b"") if number % 2 else None)
        if number != 3:
            kept.add(TokenEvent(number, (4, 5)))
    kept.close(0)
    kept.halt(1)
    kept.add(TokenEvent(2, (), "stop"))
    kept.refuse(3, OverloadedError("full"))
    for number in range(4):
        kept.close(number)
    ends = [(said(span)["reason"], said(span)["tokens"], "status" in span) for span in drawn]
    assert ends == [
        ("left", "2", False),
        ("stop", "2", False),
        ("stop", "2", False),
        ("refused: OverloadedError", "0", True),
    ]


def test_who_is_not_sampled_has_no_span_and_who_is_quiet_no_line(kept, drawn, caplog):
    caplog.set_level(logging.WARNING, "afserve.node")
    kept.open(asked(origin=Origin("my-id")), 0)
    kept.add(TokenEvent(7, (4,), "length"))
    assert not drawn and not caplog.records


@pytest.mark.slow
def test_spans_are_posted_in_batches_and_a_missing_collector_costs_spans_only(monkeypatch, caplog):
    monkeypatch.setattr(spans, "SEND_SECONDS", 0.05)
    monkeypatch.setattr(spans, "MOST_SENT", 2)
    came = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            came.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["resourceSpans"][0])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Collector)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        sender = NodeSpans(f"http://127.0.0.1:{server.server_address[1]}", "attention-3")
        for number in range(3):
            sender.put({"name": str(number)})
        until = time.monotonic() + 60
        while sum(len(part["scopeSpans"][0]["spans"]) for part in came) < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        sender.close()
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    found = [span["name"] for part in came for span in part["scopeSpans"][0]["spans"]]
    assert found == ["0", "1", "2"] and sender.dropped == 0
    about = {one["key"]: one["value"]["stringValue"] for one in came[0]["resource"]["attributes"]}
    assert about["service.name"] == "afserve" and about["service.instance.id"] == "attention-3"

    alone = NodeSpans("http://127.0.0.1:9", "attention-3")
    for number in range(4):
        alone.put({"name": str(number)})
    while alone.dropped < 4:
        assert time.monotonic() < until
        time.sleep(0.01)
    alone.close()
    alone.put({"name": "late"})
    assert alone.dropped == 5
    assert [record.getMessage() for record in caplog.records].count(
        "spans cannot be sent (URLError); this is said once"
    ) == 1


def totals(messages, rows, busy):
    return ExpertStats(messages=messages, rows=rows, calls=messages, busy_seconds=busy)


def test_an_expert_node_tells_each_two_seconds_in_which_it_computed(drawn, clock):
    at = [totals(0, 0, 0.0)]
    clock.advance(-clock.now() % 2.0)
    one, other = (WorkSpans(f"expert-{i}", lambda: at[0], drawn.append, "run", clock) for i in range(2))
    clock.advance(0.5)
    at[0] = totals(3, 40, 0.25)
    assert one.stats() == at[0] and not drawn
    clock.advance(1.5)
    one.stats(), other.stats()
    first, second = drawn
    assert first["traceId"] == second["traceId"] and first["spanId"] != second["spanId"]
    assert (
        said(first)["messages"] == "3" and said(first)["rows"] == "40" and said(first)["busy_seconds"] == 0.25
    )
    clock.advance(2.0)
    one.stats()
    assert len(drawn) == 2, "nothing was computed"
    at[0] = totals(4, 41, 0.5)
    clock.advance(0.1)
    one.close()
    assert said(drawn[2])["rows"] == "1" and drawn[2]["traceId"] != first["traceId"]
