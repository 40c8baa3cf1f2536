"""The Responses API through the official client, and what is kept of its answers."""

import asyncio
import json

import httpx
import openai
import pytest
from pydantic import BaseModel

from afserve.clock import FakeClock
from afserve.errors import NotFoundError
from afserve.server.endpoints.surfaces import ResponseStore, StoredResponse
from afserve.server.state.database import Database
from tests.server.stored import kept
from tests.server.test_structured import nano  # noqa: F401 - a fixture
from tests.server.test_tools import CALLS, roomy, server  # noqa: F401 - fixtures

TOOLS = [
    {"type": "function", "name": "forecast", "parameters": {"type": "object"}, "strict": False},
    {"type": "function", "name": "time", "parameters": None, "strict": False},
]


class Size(BaseModel):
    width: int


@pytest.fixture
def client(server):  # noqa: F811
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_text(server, which=-1):  # noqa: F811
    ids = server.backend.requests[which].prompt_ids
    return server.backend.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.slow
def test_whole(client, server):  # noqa: F811
    said = client.responses.create(model="tiny", input="hello", instructions="be short", metadata={"a": "b"})
    assert said.output_text == server.backend.reply and said.status == "completed"
    assert said.usage.output_tokens == 8 and said.usage.input_tokens_details.cached_tokens == 2
    assert said.usage.input_tokens_details.cache_write_tokens == said.usage.input_tokens - 2
    assert said.instructions == "be short" and said.metadata == {"a": "b"}
    assert prompt_text(server) == "<|system|>be short<|end|><|user|>hello<|end|><|assistant|>"


@pytest.mark.slow
def test_stream(client, server):  # noqa: F811
    with client.responses.stream(model="tiny", input=[{"role": "user", "content": "hello"}]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == server.backend.reply
    assert final.output_text == server.backend.reply


@pytest.mark.slow
def test_calls(client, server):  # noqa: F811
    server.backend.reply = CALLS
    said = client.responses.create(model="tiny", input="hello", tools=TOOLS)
    assert [item.type for item in said.output] == ["message", "function_call", "function_call"]
    assert json.loads(said.output[1].arguments) == {"city": "Bern", "days": 2}
    events = list(client.responses.create(model="tiny", input="hello", tools=TOOLS, stream=True))
    deltas = [
        e.delta for e in events if e.type == "response.function_call_arguments.delta" and e.output_index == 1
    ]
    assert len(deltas) > 3 and json.loads("".join(deltas)) == {"city": "Bern", "days": 2}


def test_a_response_follows_another(client, server):  # noqa: F811
    server.backend.reply = CALLS
    first = client.responses.create(model="tiny", input="hello", tools=TOOLS, instructions="only here")
    server.backend.reply = "warm"
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        for call in first.output
        if call.type == "function_call"
    ]
    second = client.responses.create(model="tiny", input=results, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    text = prompt_text(server)
    assert text.startswith("<|user|>hello<|end|><|assistant|>One moment. <|end|><|tool|>sun<|end|>")
    client.responses.create(model="tiny", input="and?", previous_response_id=second.id)
    assert prompt_text(server).endswith("warm<|end|><|user|>and?<|end|><|assistant|>")


def test_what_is_kept(client, server):  # noqa: F811
    said = client.responses.create(model="tiny", input="hello")
    assert client.responses.retrieve(said.id).output_text == said.output_text
    with pytest.raises(openai.BadRequestError, match="stream: is not supported"):
        client.responses.retrieve(said.id, stream=True)
    assert [item.role for item in client.responses.input_items.list(said.id)] == ["user"]
    client.responses.delete(said.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(said.id)
    unkept = client.responses.create(model="tiny", input="hello", store=False)
    with pytest.raises(openai.NotFoundError, match="not kept"):
        client.responses.create(model="tiny", input="x", previous_response_id=unkept.id)


INPUT = [
    {"role": "user", "content": "hello"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
    {"type": "reasoning", "id": "mine", "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "id": "mine", "call_id": "c", "name": "time", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "noon"},
    {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
]


def test_what_was_asked_is_a_list_of_items_with_ids(server):  # noqa: F811
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        said = client.responses.create(model="tiny", input=INPUT, tools=TOOLS)
        items = client.responses.input_items
        page = items.list(said.id, order="asc")
        kinds = [item.type for item in page.data]
        assert kinds == [item.get("type", "message") for item in INPUT]
        assert [part.text for item in page.data[5:] for part in item.content] == ["hello"] * 2
        ids = [item.id for item in page.data]
        assert len(set(ids)) == len(ids) and ids[2] == "mine" and not page.has_more
        assert [item.id for item in items.list(said.id, limit=2)] == ids[::-1]  # over four pages
        assert [item.id for item in items.list(said.id, order="asc", after=ids[4])] == ids[5:]
        more = client.responses.create(model="tiny", input="so?", previous_response_id=said.id)
        listed = items.list(more.id, order="asc").data
        assert [item.id for item in listed[: len(ids) + 1]] == [*ids, said.output[0].id]
        assert len(listed) == len(ids) + 2


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("limit=0", "limit: '0' is no number from 1 to 100"),
        ("limit=101", "limit: '101' is no number"),
        ("order=up", "order: 'up' is neither asc nor desc"),
        ("after=nobody", "after: 'nobody' is not in this list"),
        ("include=file_search_call.results", "include: is not supported"),
    ],
)
def test_a_list_of_items_refuses_by_name(client, query, what):
    said = client.responses.create(model="tiny", input="hello")
    answer = httpx.get(f"{client.base_url}responses/{said.id}/input_items?{query}")
    assert answer.status_code == 400 and what in answer.json()["error"]["message"]


def test_cut_off(client, server):  # noqa: F811
    said = client.responses.create(model="tiny", input="hello", max_output_tokens=2)
    assert said.status == "incomplete" and said.incomplete_details.reason == "max_output_tokens"


def test_an_error_after_the_first_token_is_an_event(client, server):  # noqa: F811
    from afserve.errors import PeerLost

    server.backend.error, server.backend.fail_at = PeerLost("attention-0", "it died"), 3
    events = list(client.responses.create(model="tiny", input="hello", stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert "lost" in events[-2].message and "lost" in events[-1].response.error.message


@pytest.mark.slow
def test_a_format(nano):  # noqa: F811
    said = nano.responses.parse(model="nano", input="hello", text_format=Size, temperature=0)
    assert isinstance(said.output_parsed, Size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "param, given",
    [
        ("input", {"input": []}),
        ("input[0].type", {"input": [{"type": "computer_call"}]}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("background", {"background": True}),
        ("include", {"include": ["message.output_text.logprobs"]}),
        ("max_output_tokens", {"max_output_tokens": 5000}),
        (
            "input[1].output",
            {
                "instructions": "x",
                "input": [
                    {"role": "user", "content": "x"},
                    {"type": "function_call_output", "call_id": "a", "output": {}},
                ],
            },
        ),
        ("input[0].role", {"instructions": "x", "input": [{"content": "x"}]}),
        ("tools[1].name", {"tools": [TOOLS[0], {"type": "function", "name": "no name"}]}),
        ("tools[0].parameters", {"tools": [{"type": "function", "name": "a", "parameters": 5}]}),
        ("text.format", {"text": {"format": {"type": "xml"}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n", "schema": 5}}}),
    ],
)
def test_refused_by_name(client, server, param, given):  # noqa: F811
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "tiny", "input": "x", **given})
    assert refused.value.body["param"] == param, refused.value.body
    assert server.backend.requests == []


@pytest.mark.slow
def test_the_store_is_bounded():
    async def check():
        clock, database = FakeClock(), Database()
        store = ResponseStore(database, clock, most=2, most_bytes=100, seconds=10)
        for name in "abc":
            await store.put_response("me", name, StoredResponse(b"x" * 10, b"", b""))
        assert await kept(store, "me", "abc") == ["b", "c"]
        for owner, name in (("you", "c"), ("me", "\ud800")):
            with pytest.raises(NotFoundError):
                await store.get_response(owner, name)
        await store.put_response("me", "d", StoredResponse(b"x" * 95, b"", b""))
        assert await kept(store, "me", "abcd") == ["d"]
        clock.advance(11)
        with pytest.raises(NotFoundError):
            await store.get_response("me", "d")
        await store.put_response("me", "e", StoredResponse(b"x" * 101, b"", b""))
        assert await kept(store, "me", "abcde") == []
        await database.close_file()

    asyncio.run(check())
