"""`return_routed_experts`: with the end of each choice, of every token but the last, in bodies and in streams."""

import base64
import json
from dataclasses import replace

import httpx
import pytest

from tests.server.conftest import experts_of
from tests.server.test_resume import again, events

CHAT = {"messages": [{"role": "user", "content": "the quick brown"}]}
BODIES = {
    "completion": ("/v1/completions", {"prompt": "the quick"}),
    "ids": ("/v1/completions", {"prompt": [5, 6, 7]}),
    "scored": ("/v1/completions", {"prompt": "the quick", "echo": True, "logprobs": 1}),
    "stop": ("/v1/completions", {"prompt": "the quick", "stop": ["row"]}),
    "chat": ("/v1/chat/completions", CHAT),
    "choices": ("/v1/chat/completions", {**CHAT, "n": 2, "seed": 1, "logprobs": True}),
}


def asked(name, **more):
    path, body = BODIES[name]
    return path, {"max_tokens": 12, "temperature": 0, "return_routed_experts": True, **body, **more}


def expected(usage, choices):
    """Of each choice, all of which are of one prompt and of one length."""
    tokens = usage["prompt_tokens"] + usage["completion_tokens"] // choices - 1
    return {
        "data": base64.b64encode(experts_of(range(tokens))).decode(),
        "dtype": "uint8",
        "shape": [tokens, 2, 2],
    }


@pytest.mark.parametrize("per_event", [1, 3])
@pytest.mark.parametrize("name", BODIES)
def test_bodies(server, http, name, per_event):
    server.backend.per_event = per_event
    path, body = asked(name)
    answer = http.post(path, json=body).json()
    wanted = expected(answer["usage"], len(answer["choices"]))
    assert [choice["routed_experts"] for choice in answer["choices"]] == [wanted] * len(answer["choices"])
    plain = http.post(path, json={**body, "return_routed_experts": False})
    assert "routed_experts" not in plain.text


@pytest.mark.parametrize("per_event", [1, 3])
@pytest.mark.parametrize("name", BODIES)
def test_streams_tell_them_with_the_end(server, http, name, per_event):
    server.backend.per_event = per_event
    path, body = asked(name)
    usage = http.post(path, json=body).json()["usage"]
    said = http.post(path, json={**body, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in said.split("\n\n") if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    count = max(choice["index"] for choice in choices) + 1
    for choice in choices:
        assert ("routed_experts" in choice) == (choice["finish_reason"] is not None)
    told = [choice["routed_experts"] for choice in choices if choice["finish_reason"] is not None]
    assert told == [expected(usage, count)] * count


@pytest.mark.parametrize("per_event", [1, 3])
def test_a_stream_that_is_taken_up_again_has_all_of_them(server, http, per_event):
    server.backend.per_event = per_event
    path, body = asked("completion", stream=True, resume=30)
    whole = events(http.post(path, json=body).text)
    id, told = json.loads(whole[0][1])["id"], json.loads(whole[-2][1])["choices"][0]["routed_experts"]
    assert told["shape"][0] > 6
    for at in range(len(whole) - 2):
        rest = events(again(http, id, whole[at][0]).text)
        assert json.loads(rest[-2][1])["choices"][0]["routed_experts"] == told


@pytest.mark.slow
def test_more_than_a_request_gets_is_refused(make_backend, run_server):
    """Three tokens and twelve that may come: 30 MiB, and with two choices 60."""
    backend = make_backend()
    backend.model = replace(backend.model, routed_bytes=2 << 20)
    path, body = asked("ids")
    with run_server(backend) as one, httpx.Client(base_url=one.url, timeout=20) as http:
        assert http.post(path, json=body).status_code == 200
        refused = http.post(path, json={**body, "n": 2, "seed": 1})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "return_routed_experts" and "32 MiB" in error["message"]
        assert http.post(path, json={**body, "return_routed_experts": "yes"}).status_code == 400
        assert len(backend.requests) == 1
