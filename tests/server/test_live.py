"""The page at / and its feed: files from here only, frames for who looks, and none while nobody does."""

import asyncio
import itertools
import json
import re
import time
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.control.wire.view_values import NodeView
from afserve.engine.stats import AttentionStats
from afserve.errors import OverloadedError
from afserve.metrics import Histogram, quantile
from afserve.placement.placement import LayerPlacement, Placement
from afserve.server.live import feed
from afserve.server.live.feed import MOST_READERS, WINDOW_SECONDS, Feed, Recent
from afserve.server.live.page import FILES
from afserve.tracing.recording import Recording

LAYER = LayerPlacement(((0, -1), (0, 1)), ((0.5, 0.0), (0.5, 1.0)))
PLACED = Placement(epoch=3, nodes=2, experts=2, layers=(LAYER, LAYER))
OFTEN = 0.1  # seconds between two of what is made every few, the least that there may be


@pytest.fixture(scope="module")
def often(make_backend, run_server):
    """A server whose feed has no pauses that a test would wait for."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SECONDS", "TIMELINE_SECONDS", "HISTORY_SECONDS"):
            patch.setattr(feed, name, OFTEN)
        with run_server(make_backend()) as server:
            yield server


@pytest.fixture
def http(often):
    with httpx.Client(base_url=often.url, timeout=20) as client:
        yield client


@pytest.fixture
def looked(often, monkeypatch):
    """The server, with a placement, and how often somebody asked the cluster for its view."""
    views = []
    view = often.backend.view

    async def counted():
        views.append(time.monotonic())
        return await view()

    async def placement():
        return PLACED.to_json()

    nodes = (NodeView("attention-0", "attention", "ready", 1, 0.1, 1 << 20, AttentionStats()),)
    monkeypatch.setattr(often.backend, "nodes", nodes)
    monkeypatch.setattr(often.backend, "view", counted, raising=False)
    monkeypatch.setattr(often.backend, "placement", placement, raising=False)
    often.views = views
    return often


def events(reply):
    """Each event of a stream, as it comes."""
    name = ""
    for line in reply.iter_lines():
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            yield name, json.loads(line[5:])


def test_a_reader_is_sent_where_experts_stand_and_then_frames(looked, http):
    with http.stream("GET", "/live") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        told = (event for event in events(reply) if event[0] != "timeline")  # that comes when it is drawn
        (begun, past), (first, placed), (second, frame), (third, later) = itertools.islice(told, 4)
    assert begun == "history" and set(past) == {"at", "rates", "kv", "keys", "first_token", "inter_token"}
    assert (first, second, third) == ("placement", "frame", "frame")
    assert placed == {"epoch": 3, "holders": [[[0, 1], [1]], [[0, 1], [1]]]}
    assert frame["status"]["nodes"][0]["name"] == "attention-0" and frame["status"]["model"]["id"] == "tiny"
    assert frame["status"]["kv_hits"] == {"memory": 0, "peer": 0, "host": 0, "disk": 0}
    assert frame["status"]["key_hits"] == {}
    assert later["at"] > frame["at"] and set(frame["latency"]) == {"first_token", "inter_token"}


def test_a_reader_is_sent_what_the_nodes_do_and_nobody_records_otherwise(looked, http, monkeypatch):
    asked = []

    async def recordings():
        asked.append(1)
        attend = ("micro-batch 0", "attend", 1.1, 1.3, {})
        return (Recording("attention-0", 1.0, 2.0, (attend,)).pack(),)

    monkeypatch.setattr(looked.backend, "recordings", recordings, raising=False)
    assert not asked
    with http.stream("GET", "/live") as reply:
        value = next(
            value
            for name, value in itertools.islice(events(reply), 30)
            if name == "timeline" and value["micros"]
        )
    assert value["micros"] == 1_000_000 and abs(value["at"] - time.time()) < 60
    assert value["nodes"][0]["lanes"][0]["spans"] == [[100_000, 300_000, "attend", 0, 0]]


def test_frames_have_the_latencies_of_what_was_answered_meanwhile(looked, http):
    with http.stream("GET", "/live") as reply, httpx.Client(base_url=looked.url, timeout=60) as other:
        stream = events(reply)
        assert [name for name, _ in itertools.islice(stream, 3)] == ["history", "placement", "frame"]
        assert other.post("/v1/completions", json={"prompt": "x", "max_tokens": 4}).is_success
        said = (
            frame["latency"]["first_token"] for name, frame in itertools.islice(stream, 30) if name == "frame"
        )
        found = next(latency for latency in said if latency is not None)
    assert 0 <= found["p50"] <= found["p90"] <= found["p99"]


@pytest.mark.slow
def test_while_nobody_looks_only_the_history_asks_the_cluster(looked, http):
    with http.stream("GET", "/live") as one, httpx.stream("GET", f"{looked.url}/live", timeout=60) as two:
        for reply in (one, two):
            first = [name for name, _ in itertools.islice(events(reply), 3)]
            assert first == ["history", "placement", "frame"]
    until = time.monotonic() + 60
    while time.monotonic() < until:  # the last frame may be under way
        seen, began = len(looked.views), time.monotonic()
        time.sleep(5 * OFTEN)
        if len(looked.views) - seen <= (time.monotonic() - began) / OFTEN + 1:  # frames would double it
            return
    pytest.fail("frames are made for nobody")


def test_a_frame_that_cannot_be_made_does_not_end_the_feed(looked, http, monkeypatch, caplog):
    whole, tried = looked.backend.view, []

    async def once_broken():
        tried.append(1)
        if len(tried) <= 3:  # one of them is a frame's, whenever the history asks
            raise RuntimeError("a bug")
        return await whole()

    monkeypatch.setattr(looked.backend, "view", once_broken, raising=False)
    with http.stream("GET", "/live") as reply:
        first = [name for name, _ in itertools.islice(events(reply), 3)]
        assert first == ["history", "placement", "frame"]
    assert "no frame for /live: a bug" in caplog.text


def test_a_reader_is_counted_before_its_answer_begins(monkeypatch):
    monkeypatch.setattr("afserve.server.live.feed.MOST_READERS", 1)
    settings = SimpleNamespace(write_deadline=1.0)
    metrics = SimpleNamespace(first_token=Histogram((1.0,)), inter_token=Histogram((1.0,)))
    feed = Feed(SimpleNamespace(settings=settings), SimpleNamespace(metrics=metrics))

    async def two():
        await feed.events()
        with pytest.raises(OverloadedError, match="the most that it serves"):
            await feed.events()

    asyncio.run(two())


def test_readers_are_bounded(looked, http, monkeypatch):
    monkeypatch.setattr("afserve.server.live.feed.MOST_READERS", 0)
    assert MOST_READERS > 0
    refused = http.get("/live")
    assert refused.status_code == 429 and "the most that it serves" in refused.json()["error"]["message"]


def test_the_page_needs_no_key_and_its_data_does(make_backend, run_server):
    keys = {"api_keys": ("one",), "admin_keys": ("root",)}
    with run_server(make_backend(), **keys) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        assert [http.get(path).status_code for path in ("/", "/static/live.css")] == [200, 200]
        bearer = [{"authorization": f"Bearer {key}"} for key in ("one", "wrong")]
        assert [http.get("/live", headers=h).status_code for h in ({}, *bearer)] == [401, 403, 401]


def test_the_page_loads_only_what_is_there(http):
    page = http.get("/")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    wanted = re.findall(r'(?:src|href)="(/[^"]*)"', page.text)
    for script in FILES.glob("live/*.js"):
        wanted += [f"/static/live/{name}" for name in re.findall(r'from "\./(\w+\.js)"', script.read_text())]
    assert len(wanted) > 8
    for path in wanted:
        assert http.get(path).is_success, path
    text = page.text + "".join(path.read_text() for path in FILES.glob("live*/*.js"))
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)


@pytest.mark.parametrize(
    "name",
    [
        "../app.py",
        "..%2fapp.py",
        "%2e%2e/app.py",
        "/etc/passwd",
        "live",
        "",
        "vendor/uplot.LICENSE",
        "x" * 3000,
    ],
)
def test_no_other_file_is_served(http, name):
    assert http.get(f"/static/{name}").status_code == 404


def test_elements_that_the_scripts_use_are_on_the_page():
    page = (FILES / "live.html").read_text()
    used = {n for path in FILES.glob("live/*.js") for n in re.findall(r'\$\("(\w+)"\)', path.read_text())}
    used |= {"rate", "kv", "first", "inter"}
    assert len(used) > 15
    assert [name for name in sorted(used) if f'id="{name}"' not in page] == []


BOUNDS = (0.1, 0.2, 0.4)


@pytest.mark.parametrize(
    "counts, share, value",
    [((2, 2, 0, 0), 0.5, 0.1), ((0, 4, 0, 0), 0.5, 0.15), ((0, 0, 0, 3), 0.5, 0.4), ((0, 0, 0, 0), 0.9, 0.0)],
)
def test_quantiles_of_buckets(counts, share, value):
    assert quantile(BOUNDS, counts, share) == pytest.approx(value)


@given(st.lists(st.floats(0, 10, allow_nan=False), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_value(values, share):
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    exact = sorted(values)[max(0, -(-int(share * len(values) * 1e9) // 10**9) - 1)]
    found = quantile(histogram.bounds, histogram.bucket_counts, share)
    assert found <= BOUNDS[-1]
    edges = (0.0, *BOUNDS)
    bucket = next((i for i, high in enumerate(BOUNDS) if exact <= high), None)
    assert found == BOUNDS[-1] if bucket is None else edges[bucket] <= found <= BOUNDS[bucket] + 1e-9


def test_recent_is_what_came_in_the_last_seconds_and_the_last_answer_stays():
    histogram = Histogram(BOUNDS)
    histogram.observe(0.3)
    recent = Recent(histogram)
    assert recent.read_quantiles(100.0)["p99"] > 0.2
    histogram.observe(0.05)
    assert recent.read_quantiles(101.0)["p50"] <= 0.1, "what was there at the first look is over"
    assert recent.read_quantiles(101.0 + WINDOW_SECONDS) is None
    assert recent.last["p50"] <= 0.1


@pytest.mark.slow
def test_who_asks_only_for_the_head_gets_it_at_once(server, http):
    reply = http.head("/live")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
