"""Several models behind one gateway: each request reaches the one it names, and one that is down hurts no other."""

import json
from dataclasses import replace

import httpx
import pytest

from afserve.placement.placement import LayerPlacement, Placement

MESSAGES = [{"role": "user", "content": "x"}]
ASKS = (
    ("/v1/completions", {"prompt": "x", "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 4}),
    ("/v1/embeddings", {"input": "x"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ("/api/chat", {"messages": MESSAGES, "stream": False}),
    ("/api/generate", {"prompt": "x", "stream": False}),
)


@pytest.fixture(scope="module")
def pair(make_backend, run_server):
    """Two models, the second with a shorter context, behind keys for clients and for what changes nodes."""
    small, large = make_backend(), make_backend()
    small.model = replace(small.model, name="small", aliases=("s",))
    large.model = replace(large.model, name="large", max_model_len=128)
    with run_server(small, large, admin_keys=("root",)) as server:
        yield server, small, large


@pytest.fixture
def http(pair):
    server, small, large = pair
    for backend in (small, large):
        backend.is_ready = True
        backend.requests.clear()
        backend.changes.clear()
        backend.applied.clear()
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer root"}, timeout=20) as client:
        yield client


@pytest.mark.parametrize(("path", "body"), ASKS)
def test_the_name_chooses(http, pair, path, body):
    _, small, large = pair
    for name, wanted, other in ((None, small, large), ("s", small, large), ("large", large, small)):
        small.requests.clear()
        large.requests.clear()
        reply = http.post(path, json=body if name is None else {**body, "model": name})
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == wanted.model.name
        assert len(wanted.requests) == 1 and not other.requests
    refused = http.post(path, json={**body, "model": "huge"})
    assert refused.status_code == 404 and "'small' and 's' and 'large' are" in refused.text


def test_text_is_the_named_model_s(http):
    for name, limit in (("small", 256), ("large", 128)):
        said = http.post("/tokenize", json={"prompt": "x", "model": name}).json()
        assert said["max_model_len"] == limit
    long = {"prompt": "x", "model": "large", "max_tokens": 200}
    assert http.post("/v1/completions", json=long).status_code == 400
    assert http.post("/v1/completions", json={**long, "model": "small"}).status_code == 200


@pytest.mark.slow
def test_a_response_may_be_followed_by_another_model(http):
    first = http.post("/v1/responses", json={"input": "x", "model": "small", "max_output_tokens": 4}).json()
    body = {"input": "y", "model": "large", "previous_response_id": first["id"], "max_output_tokens": 4}
    assert http.post("/v1/responses", json=body).json()["model"] == "large"


def test_lines_of_a_batch_say_their_model(http):
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "x", "model": name},
        }
        for name in ("small", "large", "huge")
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    kept = http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": kept["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=asked).json()
    while batch["status"] in ("validating", "in_progress", "finalizing"):
        batch = http.get(f"/v1/batches/{batch['id']}").json()
    answers = http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    told = {line["custom_id"]: line["response"]["body"]["model"] for line in map(json.loads, answers)}
    assert told == {"small": "small", "large": "large"}
    assert batch["request_counts"]["failed"] == 1


def test_a_kept_request_is_found_whatever_its_model(http):
    for name in ("small", "large"):
        body = {"prompt": "x", "model": name, "resume": 20, "max_tokens": 4}
        answer = http.post("/v1/completions", json=body).json()
        again = http.get(f"/v1/requests/{answer['id']}/answer").json()
        assert again["model"] == name and again["choices"] == answer["choices"]
        assert http.get(f"/v1/requests/{answer['id']}").json()["model"] == name


def test_one_that_is_down_hurts_no_other(http, pair):
    large = pair[2]
    large.is_ready = False
    ask = {"prompt": "x", "max_tokens": 1}
    assert http.post("/v1/completions", json={**ask, "model": "small"}).status_code == 200
    assert http.post("/v1/completions", json={**ask, "model": "large"}).status_code == 503
    assert http.get("/health").status_code == 200
    assert http.get("/ready?model=small").status_code == 200
    assert http.get("/ready?model=large").status_code == http.get("/ready").status_code == 503
    assert (
        http.get("/status?model=small").json()["ready"]
        and not http.get("/status?model=large").json()["ready"]
    )
    assert http.post("/admin/scale?model=small", json={"attention": 2}).status_code == 202


def test_what_says_which_model(http, pair):
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["small", "s", "large"]
    assert http.get("/status").json()["models"] == ["small", "large"]
    assert http.get("/status?model=large").json()["model"]["id"] == "large"
    assert http.get("/status?model=huge").status_code == 404
    http.post("/v1/completions", json={"prompt": "x", "model": "large", "max_tokens": 3})
    text = http.get("/metrics").text
    assert 'afserve_generation_tokens_total{model_name="small"}' in text
    assert 'vllm:num_requests_running{model_name="large",engine="0"} 0' in text
    assert text.count("# TYPE afserve_num_requests_running gauge") == 1
    assert 'afserve_http_responses_total{route="/v1/completions",status="200"}' in text, (
        "of the gateway as a whole"
    )


def test_the_page_looks_at_one_of_them(http, pair, monkeypatch):
    layer = LayerPlacement(((0, 1),), ((1.0, 1.0),))

    async def placement():
        return Placement(3, 1, 2, (layer,)).to_json()

    monkeypatch.setattr(pair[2], "placement", placement, raising=False)
    with http.stream("GET", "/live?model=large") as live:
        frame = next(line for line in live.iter_lines() if line.startswith("data: ") and '"status"' in line)
    assert json.loads(frame[6:])["status"]["model"]["id"] == "large"
    assert http.get("/live?model=huge").status_code == 404


def test_a_change_says_which_model(http, pair):
    _, small, large = pair
    refused = http.post("/admin/scale", json={"attention": 2})
    assert refused.status_code == 400 and "?model=NAME, one of small, large" in refused.text
    assert http.post("/admin/scale?model=huge", json={"attention": 2}).status_code == 404
    assert http.post("/admin/scale?model=large", json={"attention": 2}).status_code == 202
    assert len(large.changes) == 1 and not small.changes
    placement = http.post("/admin/placement?model=small", json={"layers": []})
    assert placement.status_code == 202 and small.applied and not large.applied
