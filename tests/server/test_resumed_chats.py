"""Chats with `resume`: calls, reasoning and deadlines are told in the same words by whoever goes on with them."""

import asyncio
import json
import time
from array import array
from dataclasses import replace

import httpx
import pytest

from afserve.engine.scheduling.request import SamplingParams, TokenEvent
from afserve.server.answers.asked import Asked
from afserve.server.bodies.declared import Scheduling
from afserve.server.bodies.openai import ResumeOptions, StreamOptions
from afserve.server.bodies.prepared import Prepared
from afserve.server.reading.table import Reading
from afserve.server.replies.choice import ChoiceDecoder
from afserve.server.replies.record import AnswerRecord, Position
from afserve.server.replies.wording import Usage
from afserve.server.text.kinds import BodyKind
from tests.server.test_resume import ID, events
from tests.server.test_tools import CALLS, TOOLS, USER

THOUGHTS = "<think>the fox is quick</think>" + CALLS


def asked(**fields):
    body = {
        "messages": USER,
        "tools": TOOLS,
        "max_tokens": 400,
        "temperature": 0,
        "stream": True,
        "resume": 30,
    }
    return body | fields


def calls(found):
    """Text, and (id, name, arguments) of each call, as a client adds them up."""
    text, told = "", {}
    for _, data in found:
        for choice in [] if data == "[DONE]" else json.loads(data)["choices"]:
            text += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls", []):
                call = told.setdefault(part["index"], ["", "", ""])
                call[0] += part.get("id", "")
                call[1] += part["function"].get("name", "")
                call[2] += part["function"].get("arguments", "")
    return text, [tuple(told[i]) for i in sorted(told)]


@pytest.fixture
def roomy(make_backend):
    """Backends that share what their attention nodes keep, with room for the words of tools."""
    kept = []

    def make(**given):
        backend = make_backend(**given)
        backend.model = replace(backend.model, max_model_len=2048)
        kept.append(backend)
        backend.nodes_kept = kept[0].nodes_kept
        return backend

    return make


@pytest.mark.slow
@pytest.mark.parametrize("per_event", [1, 7])
def test_calls_go_on_behind_any_event_at_any_server(roomy, run_server, per_event):
    with run_server(roomy(reply=CALLS, per_event=per_event)) as one, run_server(roomy(reply=CALLS)) as two:
        whole = events(httpx.post(f"{one.url}/v1/chat/completions", json=asked()).text)
        text, told = calls(whole)
        assert text == "One moment. "
        assert [(name, json.loads(said)) for _, name, said in told] == [
            ("forecast", {"city": "Bern", "days": 2}),
            ("time", {}),
        ]
        id = json.loads(whole[0][1])["id"]
        for at in range(1, len(whole) - 1):
            url = (one if at % 2 else two).url
            rest = httpx.get(f"{url}/v1/requests/{id}/events", headers={"last-event-id": whole[at][0]})
            assert calls(whole[: at + 1] + events(rest.text)) == (text, told)
        body = httpx.get(f"{two.url}/v1/requests/{id}/answer").json()["choices"][0]
        assert body["finish_reason"] == "tool_calls"
        assert [call["id"] for call in body["message"]["tool_calls"]] == [call[0] for call in told]


def prepared(**fields):
    reading = Reading("hermes", "tags", types={"forecast": {"days": "integer"}})
    params = SamplingParams(max_tokens=400, grammar="start: /x/", stop_token_ids=(1,), seed=5)
    scheduling = Scheduling(-3, "salt", 60.0)
    stream = StreamOptions(include_usage=True)
    given = Prepared((array("i", [3, 4]),), params, None, stream, False, None, scheduling, reading)
    return replace(given, resume=ResumeOptions(30.0, ID), **fields)


def test_another_gateway_reads_all_that_was_asked():
    one = Asked.new(BodyKind.CHAT, prepared(), 1_000, "me")
    (keep,) = one.keeps()
    assert Asked.restored(keep.about, {0: (3, 4)}) == one
    assert one.task(0.0).request(0).cache_salt == "salt" and one.task(0.0).request(0).priority == -3
    assert one.seconds_left(1_010.0) == 50.0 and one.seconds_left(2_000.0) == 0.0


@pytest.mark.parametrize("size", [3, 1000])
def test_reasoning_is_counted_alike_however_it_came(tokenizer, size):
    one = Asked.new(BodyKind.CHAT, prepared(), 1_000, "me")
    ids = tokenizer.encode(THOUGHTS)

    def decoder(index):
        return ChoiceDecoder(tokenizer, one.prepared.params, skip_special_tokens=False)

    async def usage(step, since):
        record, feed = AnswerRecord(1, exact=one.exact), decoder(0)
        for at in range(0, len(ids), step):
            last = "stop" if at + step >= len(ids) else None
            event = TokenEvent(0, tuple(ids[at : at + step]), finish_reason=last)
            record.record_piece(0, event, feed.decode_event(event))
        reply, counted = one.reply(tokenizer), Usage(2)
        async for index, piece in record.follow(decoder, since):
            counted.count_piece(piece)
            reply.plain(index, piece, "")
        return reply.usage(counted)

    expected = asyncio.run(usage(1, Position.at_start(1)))
    thought = expected["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < thought < len(ids)
    for at in (0, 1, 9, len(ids) - 1):
        assert asyncio.run(usage(size, Position([at], [False]))) == expected


@pytest.mark.slow
def test_a_deadline_ends_a_request_that_nobody_reads(make_backend, run_server):
    backend = make_backend(hold_at=2)
    with run_server(backend) as server, httpx.Client(base_url=server.url) as http:
        body = {"prompt": "x", "max_tokens": 20, "stream": True, "resume": 30, "request_id": ID}
        with http.stream("POST", "/v1/completions", json=body | {"deadline": 0.3}) as stream:
            next(stream.iter_raw())
        assert backend.ended.wait(10), "it is closed where it is computed"
        until = time.monotonic() + 10
        while http.get(f"/v1/requests/cmpl-{ID}").json()["status"] == "running" and time.monotonic() < until:
            time.sleep(0.01)
        answer = http.get(f"/v1/requests/cmpl-{ID}/answer")
        assert answer.status_code == 504 and "after 0.3 s" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 5}),
        ("/api/chat", {"messages": USER}),
        ("/api/generate", {"prompt": "x"}),
    ],
)
def test_other_apis_refuse_it_by_name(server, http, path, body):
    answer = http.post(path, json=body | {"model": "tiny", "resume": 30})
    assert answer.status_code == 400 and "resume: is not supported here" in answer.text
