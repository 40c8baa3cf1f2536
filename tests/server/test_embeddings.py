"""/v1/embeddings through the official client, and what it refuses."""

import asyncio
import base64
import socket
from array import array
from contextlib import closing

import httpx
import openai
import pytest

from afserve import AsyncClient, Client
from afserve.errors import RequestError
from tests.server.conftest import vector_of

POST = (
    b"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_inputs_of_every_kind(client, server):
    ids = server.backend.tokenizer.encode("hello")
    for given, wanted in (
        ("hello", [ids]),
        (["hello", "x"], [ids, server.backend.tokenizer.encode("x")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ):
        answer = client.embeddings.create(model="tiny", input=given)  # the client asks for base64
        assert [one.index for one in answer.data] == list(range(len(wanted)))
        for one, prompt in zip(answer.data, wanted, strict=True):
            assert one.embedding == pytest.approx(vector_of(tuple(prompt)))
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, wanted))
        assert answer.model == "tiny" and answer.object == "list"


@pytest.mark.parametrize("given", ["hello", ["hello", "x"], (5, 6, 7), [(5,), [6, 7]]])
def test_our_clients_say_what_openais_does(client, server, given):
    wanted = client.embeddings.create(model="tiny", input=given)
    with Client(server.url) as ours:
        told = ours.embed(given)

    async def awaited():
        async with AsyncClient(server.url) as ours:
            return await ours.embed(given)

    assert asyncio.run(awaited()) == told
    assert [list(vector) for vector in told.vectors] == [one.embedding for one in wanted.data]
    assert (told.model, told.prompt_tokens) == (wanted.model, wanted.usage.prompt_tokens)
    with Client(server.url) as ours, pytest.raises(RequestError, match="input") as refused:
        ours.embed([])
    assert refused.value.param == "input"


def test_both_formats_say_the_same(http, server):
    said = {}
    for form in ("float", "base64"):
        reply = http.post("/v1/embeddings", json={"input": [5, 6, 9], "encoding_format": form}).json()
        said[form] = reply["data"][0]["embedding"]
    assert array("f", base64.b64decode(said["base64"])) == array("f", said["float"])
    request = server.backend.requests[-1]
    assert request.params.pooled and request.params.max_tokens == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [({}, "input"), ({"input": []}, "input"), ({"input": 5}, "input"), ({"input": [[5], "x", 7]}, "input[2]"),
     ({"input": [9999]}, "input"), ({"input": "x", "dimensions": 8}, "dimensions"),
     ({"input": "x", "encoding_format": "int8"}, "encoding_format"), ({"input": "x", "model": "y"}, "model"),
     ({"input": "x", "stream": True}, "stream"),
     ({"input": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
     ({"input": ["x"] * 257}, "input"), ({"input": [5] * 256}, "input"), ({"input": "x", "resume": 9}, "resume"),
     ({"input": "x", "request_id": "7"}, "request_id")],
)  # fmt: skip
def test_refused_by_name(http, fields, param):
    reply = http.post("/v1/embeddings", json=fields)
    assert reply.status_code in (400, 404) and reply.json()["error"]["param"] == param, reply.text


def test_a_failure_ends_it(http, server):
    from afserve.errors import UnavailableError

    server.backend.error = UnavailableError("no node", retry_after=3)
    reply = http.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert reply.status_code == 503 and reply.headers["retry-after"] == "3"


def test_a_client_that_leaves(server):
    server.backend.hold_at = 0
    body = b'{"input":["a","b"]}'
    with closing(socket.create_connection(("127.0.0.1", server.port))) as sock:
        sock.sendall(POST % len(body) + body)
        assert server.backend.holding.wait(60)
    assert server.backend.ended.wait(60)


@pytest.mark.parametrize("form, said", [("float", "encoding_format base64"), ("base64", "in parts")])
def test_more_vectors_than_an_answer_may_hold(make_backend, run_server, form, said):
    with run_server(make_backend(), max_answer_bytes=1024) as server:
        ask = {"input": ["x"] * 256, "encoding_format": form}
        reply = httpx.post(f"{server.url}/v1/embeddings", json=ask, timeout=60)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "input"
    assert said in reply.json()["error"]["message"]
