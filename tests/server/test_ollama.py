"""What Ollama's clients ask beside a chat: lists, a model's card, vectors, an empty prompt, errors, bare curl."""

import json
from dataclasses import replace

import httpx
import pytest

from afserve.server.endpoints.ollama_models import card_of
from tests.server.nano import FOLDER
from tests.server.test_tools import roomy, server  # noqa: F401 - fixtures

ASK = {"model": "tiny", "prompt": "hello", "stream": False}


@pytest.fixture
def http(server):  # noqa: F811
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def prompt_text(server):  # noqa: F811
    ids = server.backend.requests[-1].prompt_ids
    return server.backend.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
@pytest.mark.parametrize("key", ["model", "name"])
def test_a_models_card(http, key, name):
    card = http.post("/api/show", json={key: name}).json()
    assert card["capabilities"] == ["completion", "tools"]
    family = card["model_info"]["general.architecture"]
    assert card["model_info"][f"{family}.context_length"] == 2048
    assert "<|{{ m.role }}|>" in card["template"] and card["details"]["families"] == [family]


def test_a_models_card_is_read_from_its_folder():
    card = card_of(str(FOLDER.resolve()))
    assert card.family == "deepseek_v3" and card.quantization == "BF16"
    assert card.size == (FOLDER / "model.safetensors").stat().st_size
    assert card.parameters * 2 < card.size * 1.5 and card.parameter_size == f"{card.parameters / 1e6:.3g}M"
    assert len(card.digest) == 64 and card.digest == card_of(str(FOLDER.resolve())).digest


def test_a_folder_without_a_configuration_has_a_card(tmp_path):
    card = card_of(str(tmp_path))
    assert (card.family, card.size, card.parameter_size, card.quantization) == ("moe", 0, "", "")


@pytest.mark.parametrize(
    ("status", "body"),
    [(404, {"model": "other"}), (400, {}), (400, {"model": 5}), (400, {"model": "tiny", "x": "y" * 70_000})],
)
def test_a_card_refused(http, status, body):
    said = http.post("/api/show", json=body)
    assert said.status_code == status and isinstance(said.json()["error"], str)


def test_lists(http):
    (listed,) = http.get("/api/tags").json()["models"]
    (loaded,) = http.get("/api/ps").json()["models"]
    assert listed["name"] == loaded["name"] == "tiny" and len(listed["digest"]) == 64
    assert loaded["context_length"] == 2048 and loaded["expires_at"] > listed["modified_at"]
    assert listed["details"] == loaded["details"]


def test_vectors(http):
    plain = http.post("/v1/embeddings", json={"input": ["hello", "world"]}).json()
    said = http.post(
        "/api/embed", json={"model": "tiny:latest", "input": ["hello", "world"], "keep_alive": "5m"}
    )
    assert said.json()["embeddings"] == [each["embedding"] for each in plain["data"]]
    assert said.json()["prompt_eval_count"] == plain["usage"]["prompt_tokens"]
    assert said.headers["x-afserve-ignored"] == "keep_alive"
    one = http.post("/api/embeddings", json={"model": "tiny", "prompt": "hello"}).json()
    assert one == {"embedding": plain["data"][0]["embedding"]}
    assert http.post("/api/embed", json={"model": "tiny", "input": "hello"}).json()["embeddings"] == [
        one["embedding"]
    ]
    for path, body in (
        ("embed", {"input": []}),
        ("embed", {"input": "x", "dimensions": 4}),
        ("embeddings", {}),
    ):
        refused = http.post(f"/api/{path}", json={"model": "tiny", **body})
        assert refused.status_code == 400 and isinstance(refused.json()["error"], str)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("generate", {}, {"response": ""}),
        ("generate", {"prompt": "", "stream": True}, {"response": ""}),
        ("generate", {"prompt": "", "raw": True}, {"response": ""}),
        ("chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("chat", {}, {"message": {"role": "assistant", "content": ""}}),
    ],
)
@pytest.mark.parametrize(
    ("alive", "reason"), [(None, "load"), ("5m", "load"), (0, "unload"), ("0s", "unload")]
)
def test_a_request_without_words_loads(http, server, path, body, said, alive, reason):  # noqa: F811
    answer = http.post(f"/api/{path}", json={"model": "tiny", "keep_alive": alive, **body}).json()
    assert answer.pop("created_at") and answer == {
        "model": "tiny",
        **said,
        "done": True,
        "done_reason": reason,
    }
    assert server.backend.requests == []


def test_a_raw_prompt_is_a_completion(http, server):  # noqa: F811
    """As it is, to the end of the context, in the words of its own options."""
    said = http.post("/api/generate", json={**ASK, "raw": True}).json()
    assert prompt_text(server) == "hello" and said["response"] == server.backend.reply
    asked = server.backend.requests[-1]
    assert asked.params.max_tokens == 2048 - len(asked.prompt_ids)
    http.post(
        "/api/generate", json={**ASK, "raw": True, "format": "json", "options": {"num_predict": 3, "seed": 4}}
    )
    params = server.backend.requests[-1].params
    assert (params.max_tokens, params.seed) == (3, 4) and params.grammar
    refused = http.post("/api/generate", json={**ASK, "raw": True, "options": {"num_predict": 5000}})
    assert refused.json()["error"].startswith("options.num_predict: 5000 after")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize(
    "path", ["/api", "/api/", "/api/pull", "/api/blobs/x", "/api/chat/more", "/api/chat"]
)
def test_errors_are_text(http, path, method):
    said = http.request(method, path, content=b"[", headers={"content-type": "application/json"})
    assert said.status_code in (400, 404, 405) and isinstance(said.json()["error"], str)


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
@pytest.mark.parametrize("path", ["/api/generate", "/api/chat", "/api/show", "/api/embed"])
def test_curl_needs_no_content_type(http, path, kind):
    """What a browser's page could send without being asked first is refused."""
    body = json.dumps({**ASK, "input": "x", "messages": [{"role": "user", "content": "x"}]})
    headers = {} if kind is None else {"content-type": kind}
    assert http.post(path, content=body, headers=headers).status_code == 200
    for browser in (
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "cross-site"},
        {"referer": "http://x"},
    ):
        said = http.post(path, content=body, headers={**headers, **browser})
        assert said.status_code == 415 and isinstance(said.json()["error"], str)
    assert http.post("/v1/completions", content=body, headers=headers).status_code == 415


@pytest.mark.slow
def test_pages_of_this_machine_may_ask(http):
    page = {"origin": "http://localhost:3000"}
    before = http.options(
        "/api/chat",
        headers={**page, "access-control-request-method": "POST", "access-control-request-headers": "x-a"},
    )
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == page["origin"]
    said = http.post("/api/chat", json={**ASK, "messages": [{"role": "user", "content": "x"}]}, headers=page)
    assert said.status_code == 200 and said.headers["access-control-allow-origin"] == page["origin"]
    assert "x-afserve-ignored" in said.headers["access-control-expose-headers"]


@pytest.mark.slow
def test_several_names(make_backend, run_server):
    backend = make_backend()
    backend.model = replace(backend.model, aliases=("small:latest",))
    with run_server(backend) as running, httpx.Client(base_url=running.url, timeout=20) as http:
        assert [each["name"] for each in http.get("/api/ps").json()["models"]] == ["tiny", "small:latest"]
        for name in ("tiny", "tiny:latest", "small:latest"):
            assert http.post("/api/generate", json={**ASK, "model": name}).status_code == 200, name
            assert http.post("/api/show", json={"model": name}).status_code == 200, name
