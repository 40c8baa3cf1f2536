"""Client and AsyncClient against a real server: the same answers, and errors as afserve's own."""

import asyncio
from contextlib import aclosing, closing
from dataclasses import replace

import pytest

from afserve import AsyncClient, Client, SamplingParams
from afserve.errors import (
    AuthError,
    CapacityError,
    OverloadedError,
    PeerError,
    PeerLost,
    RequestError,
    TooLargeError,
    UnavailableError,
)

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server):
    with Client(server.url) as client:
        yield client


def test_complete_and_stream_agree(client, server):
    params = SamplingParams(max_tokens=32, temperature=0)
    reply = client.complete("x", params)
    deltas = list(client.complete_stream("x", params))
    assert reply.text == server.backend.reply == "".join(d.text for d in deltas)
    assert deltas[-1].completion_tokens == reply.completion_tokens
    seeds = [r.params.seed for r in server.backend.requests]
    assert None not in seeds and seeds[0] != seeds[1]
    assert [replace(r.params, seed=None) for r in server.backend.requests] == [params, params]


@pytest.mark.slow
def test_every_sampling_field_arrives(client, server):
    params = SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=-0.4, seed=5, stop=("zz",), stop_token_ids=(4,), include_stop_str_in_output=True,
        min_tokens=2, ignore_eos=True, logprobs=3, logit_bias=((7, 2.0),),
    )  # fmt: skip
    client.complete([5, 6], params)
    client.chat(MESSAGES, params)
    assert [r.params for r in server.backend.requests] == [params, params]


def test_chat_uses_what_is_left_unless_told(client, server):
    client.chat(MESSAGES)
    client.chat(MESSAGES, SamplingParams(temperature=0), unlimited=True)
    client.chat(MESSAGES, SamplingParams(temperature=0))
    left = 256 - len(server.backend.requests[0].prompt_ids)
    assert [r.params.max_tokens for r in server.backend.requests] == [left, left, 16]


def test_chat_stream(client, server):
    assert "".join(d.text for d in client.chat_stream(MESSAGES)) == server.backend.reply


def test_small_calls(client, server, nodes):
    server.backend.nodes = nodes
    assert client.models() == ("tiny",)
    assert client.detokenize(client.tokenize("naïve 😀 text")) == "naïve 😀 text"
    assert client.ready()
    assert client.status()["epoch"] == 3
    assert "afserve_num_requests_running" in client.metrics()


def test_leaving_a_stream_cancels(client, server):
    server.backend.hold_at = 2
    with closing(client.complete_stream("x", SamplingParams(max_tokens=32))) as deltas:
        next(deltas)
    assert server.backend.ended.wait(20)
    assert not server.backend.release.is_set()


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (OverloadedError("full", retry_after=7.2), OverloadedError),
        (RequestError("no", param="prompt"), RequestError),
        (PeerError("no answer"), PeerError),
        (CapacityError("no room"), UnavailableError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token(client, server, raised, seen, stream, monkeypatch):
    monkeypatch.setattr(
        "afserve.doors.client_http._MOST_ASKED", 0.01
    )  # of the pause before it is tried again
    server.backend.error = raised
    with pytest.raises(seen) as caught:
        list(client.complete_stream("x")) if stream else client.complete("x")
    assert type(caught.value) is seen
    assert caught.value.message == raised.message
    assert getattr(caught.value, "retry_after", 8) == (1 if seen is UnavailableError else 8)


def test_error_in_mid_stream(client, server):
    server.backend.error, server.backend.fail_at = PeerLost("attention-0", "died"), 2
    deltas = client.complete_stream("x", SamplingParams(max_tokens=32))
    assert next(deltas).text
    with pytest.raises(PeerError, match="attention-0: this node was lost"):
        list(deltas)


def test_no_server():
    with Client("http://127.0.0.1:9") as client:
        assert not client.ready()
        with pytest.raises(PeerLost, match="afserve up"):
            client.chat(MESSAGES)


def test_wrong_address():
    with Client("ftp://127.0.0.1") as client, pytest.raises(RequestError, match="http"):
        client.models()


def test_key_and_size(make_backend, run_server):
    with run_server(make_backend(), api_keys=("secret",), max_body_bytes=2048) as server:
        with Client(server.url) as client, pytest.raises(AuthError):
            client.models()
        with Client(server.url, api_key="secret") as client:
            assert client.models() == ("tiny",)
            with pytest.raises(TooLargeError):
                client.complete("x" * 5000)


def test_async_client_says_the_same(server):
    async def talk() -> None:
        async with AsyncClient(server.url) as client:
            reply = await client.complete("x", SamplingParams(max_tokens=32))
            deltas = [delta async for delta in client.chat_stream(MESSAGES)]
            assert reply.text == server.backend.reply == "".join(d.text for d in deltas)
            assert (await client.chat(MESSAGES)).text == reply.text
            assert await client.models() == ("tiny",)
            assert await client.detokenize(await client.tokenize("abc")) == "abc"
            assert await client.ready()
            assert (await client.status())["model"]["id"] == "tiny"
            assert "afserve_" in await client.metrics()
            async with aclosing(client.complete_stream("x", SamplingParams(max_tokens=32))) as stream:
                await anext(stream)
        async with AsyncClient("http://127.0.0.1:9") as nobody:
            assert not await nobody.ready()
            with pytest.raises(PeerLost):
                await nobody.complete("x")

    asyncio.run(talk())
