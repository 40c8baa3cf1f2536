"""The endpoints that make no text."""

from dataclasses import replace

import httpx
import pytest

from afserve import __version__

USER = {"role": "user", "content": "x"}


def test_models(http):
    (model,) = http.get("/v1/models").json()["data"]
    assert model == http.get("/v1/models/tiny").json()
    assert model["id"] == "tiny" and model["max_model_len"] == 256
    assert "/" not in str(model.values())


@pytest.mark.slow
def test_a_model_has_several_names(make_backend, run_server):
    """Requests may say any of them; answers have the first."""
    backend = make_backend()
    backend.model = replace(backend.model, aliases=("small",))
    with run_server(backend) as running:
        with httpx.Client(base_url=running.url, timeout=20) as http:
            assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny", "small"]
            assert [model["name"] for model in http.get("/api/tags").json()["models"]] == ["tiny", "small"]
            assert http.get("/v1/models/small").json()["id"] == "small"
            assert "'tiny' and 'small' are" in http.get("/v1/models/large").json()["error"]["message"]
        for path, fields in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": [USER]})):
            for name, status in (("small", 200), ("tiny", 200), ("large", 404)):
                reply = httpx.post(
                    f"{running.url}/v1/{path}", json={**fields, "model": name, "max_tokens": 1}
                )
                assert reply.status_code == status
                assert reply.json().get("model", "tiny") == "tiny"


def test_tokenize_and_back(http, server):
    text = "def naïve() 😀<|end|>"
    body = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert body["tokens"] == server.backend.tokenizer.encode(text)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) and body["max_model_len"] == 256
    assert http.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": text}


@pytest.mark.slow
def test_tokenize_messages(http, server):
    body = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert (
        server.backend.tokenizer.decode(body["tokens"], skip_special_tokens=False)
        == "<|user|>x<|end|><|assistant|>"
    )


def test_tokenizer_info(http, server):
    """Enough for a client to make prompts of token ids itself, as lm-eval's remote tokenizer does."""
    body = http.get("/tokenizer_info").json()
    tokenizer = server.backend.tokenizer
    assert {name: body[name] for name in tokenizer.special} == tokenizer.special
    assert body["model_max_length"] == 256 and "<|assistant|>" in body["chat_template"]
    first = tokenizer.encode("x")[0]
    assert body["add_bos_token"] == (tokenizer.token(first) == body["bos_token"])
    assert http.get("/tokenizer_info?model=nosuch").status_code == 404


def test_the_routes_as_a_page(http):
    reply = http.get("/docs")
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"] and "<script" not in reply.text
    for path in ("/v1/chat/completions", "/v1/requests/{id}", "/tokenizer_info"):
        assert f"<code>{path}</code>" in reply.text
    for name, kind in (
        ("n", "integer or null, 1 to 128"),
        ("?model", "string"),
        ("endpoint", "string, required"),
    ):
        assert f"<tr><td><code>{name}</code></td><td>{kind}" in reply.text


def test_refusals(http):
    for path, body, param in [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1 << 70]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ]:
        reply = http.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_small_ones(http, server, nodes):
    server.backend.nodes = nodes
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ping").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/version").json() == {"version": __version__}
    status = http.get("/status").json()
    assert status["ready"] and status["epoch"] == 3 and status["picked"] == {"attention": "1"}
    assert [node["name"] for node in status["nodes"]] == ["attention-0", "expert-0"]
    assert status["nodes"][0]["stats"]["kv_blocks"] == 100
    assert http.head("/health").status_code == 200


def test_every_answer_has_an_id(http):
    ids = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def test_large_prompts_are_tokenized_off_the_loop(make_backend, run_server):
    backend = make_backend()
    backend.model = type(backend.model)("tiny", backend.model.path, 1 << 20, 400, 1)
    with run_server(backend) as server:
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "the quick brown fox " * 2000})
    assert reply.status_code == 200
    assert reply.json()["usage"]["prompt_tokens"] == len(backend.requests[0].prompt_ids) > 2000


def test_texts_far_too_long_are_refused_in_pieces(http, server):
    for path, field in (("/v1/completions", "prompt"), ("/tokenize", "prompt")):
        reply = http.post(path, json={field: "the quick brown fox " * 50_000})
        assert reply.status_code == 400 and "context of 256" in reply.json()["error"]["message"]
    tokenizer = server.backend.tokenizer
    text = "naïve 😀 " * 3000
    assert not tokenizer.surely_longer(text, len(tokenizer.encode(text)))
    assert tokenizer.surely_longer(text, len(tokenizer.encode(text)) // 2)


def test_the_page_brings_everything_itself(http):
    reply = http.get("/")
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "://" not in reply.text and "innerHTML" not in reply.text
