"""What Client and AsyncClient make of answers: typed values, and another try where a server has no room."""

import asyncio
import json

import httpx
import pytest

from afserve import AsyncClient, Client
from afserve.doors import client_http
from afserve.doors.client import ToolCall
from afserve.errors import CapacityError, OverloadedError, RequestError, UnavailableError

WHOLE = {
    "choices": [{"text": "y", "finish_reason": "length", "index": 0}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}
STREAM = f"data: {json.dumps({'choices': [WHOLE['choices'][0]]})}\n\ndata: [DONE]\n\n"


def refusal(status, kind="overloaded_error", after="3"):
    error = {"message": "full", "type": kind, "param": None, "code": None}
    return httpx.Response(status, json={"error": error}, headers={"retry-after": after} if after else {})


class Scripted(httpx.MockTransport):
    """Answers in turn, to both kinds of clients."""

    def __init__(self, *answers):
        self.asked = 0
        super().__init__(self.answer)
        self.answers = answers

    def answer(self, request):
        self.asked += 1
        return self.answers[self.asked - 1]


@pytest.fixture
def pauses(monkeypatch):
    """What would be waited, without waiting."""
    found, backoff = [], client_http.backoff

    def noted(*arguments):
        found.append(backoff(*arguments))
        return 0.0

    monkeypatch.setattr(client_http, "backoff", noted)
    return found


def asked(transport, retries, *, stream, awaited):
    """The text of an answer."""
    if not awaited:
        with Client("http://x", retries=retries, transport=transport) as client:
            return (
                "".join(d.text for d in client.complete_stream("x")) if stream else client.complete("x").text
            )

    async def run():
        async with AsyncClient("http://x", retries=retries, transport=transport) as client:
            if stream:
                return "".join([delta.text async for delta in client.complete_stream("x")])
            return (await client.complete("x")).text

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_full_server_is_asked_again_after_the_pause_that_it_wants(pauses, stream, awaited):
    last = httpx.Response(200, text=STREAM) if stream else httpx.Response(200, json=WHOLE)
    server = Scripted(refusal(429), refusal(503, "capacity_error", "900"), last)
    assert asked(server, 2, stream=stream, awaited=awaited) == "y"
    assert pauses == [3.0, 60.0] and server.asked == 3


def test_it_ends_with_the_servers_words(pauses):
    server = Scripted(*[refusal(429, after="Sun, 22 Nov 2026 00:00:00 GMT")] * 2)
    with pytest.raises(OverloadedError, match="full") as refused:
        asked(server, 1, stream=False, awaited=False)
    assert server.asked == 2 and len(pauses) == 1 and refused.value.retry_after == 1.0


def test_what_will_not_get_better_is_not_asked_again(pauses):
    for answer, kind in (
        (refusal(503, "capacity_error", ""), CapacityError),
        (refusal(400, "x"), RequestError),
    ):
        server = Scripted(answer)
        with pytest.raises(kind):
            asked(server, 5, stream=False, awaited=False)
        assert server.asked == 1 and not pauses
    with pytest.raises(UnavailableError):
        asked(Scripted(refusal(503, "capacity_error")), 0, stream=True, awaited=False)


def test_reasoning_and_calls_are_typed():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x":1}'}}
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
    whole = {"choices": [{"message": message, "finish_reason": "tool_calls", "index": 0}], "usage": usage}
    tools = {"tools": [{"type": "function", "function": {"name": "add"}}]}
    seen = []

    def answer(request):
        seen.append(json.loads(request.content))
        return httpx.Response(200, json=whole)

    with Client("http://x", transport=httpx.MockTransport(answer)) as client:
        reply = client.chat([{"role": "user", "content": "1+1"}], extra=tools)
    assert (reply.text, reply.reasoning, reply.cached_tokens) == ("", "hm", 8)
    assert reply.tool_calls == (ToolCall("c1", "add", '{"x":1}'),) and seen[0]["tools"] == tools["tools"]


def test_reasoning_and_calls_of_a_stream_are_typed():
    first = {"index": 1, "id": "c1", "function": {"name": "add", "arguments": ""}}
    pieces = [
        {"reasoning": "hm"},
        {"tool_calls": [first]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]
    lines = [{"choices": [{"index": 0, "delta": piece, "finish_reason": None}]} for piece in pieces]
    text = "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"
    with Client(
        "http://x", transport=httpx.MockTransport(lambda _: httpx.Response(200, text=text))
    ) as client:
        deltas = list(client.chat_stream([]))
    assert [delta.reasoning for delta in deltas] == ["hm", "", ""]
    assert deltas[1].tool_calls == (ToolCall("c1", "add", "", 1),) and deltas[2].tool_calls == (
        ToolCall("", "", "{}", 1),
    )
