"""Structured output through the official client: what is asked reaches the engine as a grammar, and is followed."""

import json

import openai
import pytest
from pydantic import BaseModel

from afserve.tokenizer import Tokenizer
from tests.server.nano import FOLDER, NanoBackend

USER = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


class Size(BaseModel):
    width: int
    kind: str


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def nano():
    """A client of the bundled model."""
    from afserve.server.settings import ServerSettings
    from tests.server.conftest import Server

    server = Server(NanoBackend(), Tokenizer.from_folder(FOLDER), ServerSettings())
    server.start()
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client
    finally:
        server.stop()


@pytest.mark.parametrize(
    "extra",
    [
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"guided_regex": "[0-9]+"},
        {"guided_choice": ["yes", "no"]},
        {"guided_grammar": 'root ::= "x" [0-9]+'},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"regex": "a|b"}},
        {"structured_outputs": {"choice": ["a"]}},
        {"structured_outputs": {"grammar": 'start: "a"'}},
        {"structured_outputs": {"json_object": True}},
        {"response_format": {"type": "json_object"}},
        {"response_format": NAMED},
    ],
)
def test_every_way_to_ask(client, server, extra):
    client.completions.create(model="tiny", prompt="x", extra_body=extra)
    client.chat.completions.create(model="tiny", messages=USER, extra_body=extra)
    one, other = (request.params.grammar for request in server.backend.requests)
    assert one and one == other


@pytest.mark.parametrize(
    "param, extra",
    [
        ("response_format", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {}}},
        ),
        ("guided_json", {"guided_json": "{"}),
        ("guided_json", {"guided_json": {"$ref": "#/nowhere"}}),
        ("guided_json", {"guided_json": {"type": "array", "uniqueItems": True}}),
        ("guided_regex", {"guided_regex": "("}),
        ("guided_regex", {"guided_regex": "x" * 200_000}),
        ("guided_choice", {"guided_choice": []}),
        ("guided_choice", {"guided_choice": ["a"] * 5000}),
        ("guided_grammar", {"guided_grammar": "start: nothing"}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "x"}}),
        ("guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
        ("ignore_eos", {"guided_regex": "a", "ignore_eos": True}),
    ],
)
def test_refused_by_name(client, server, param, extra):
    for ask in (
        lambda: client.completions.create(model="tiny", prompt="x", extra_body=extra),
        lambda: client.chat.completions.create(model="tiny", messages=USER, extra_body=extra),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask()
        assert refused.value.body["param"] == param, refused.value.body
    assert server.backend.requests == []


def test_a_schema_nested_too_deeply(client):
    schema: dict = {"type": "integer"}
    for _ in range(80):
        schema = {"type": "array", "items": schema}
    with pytest.raises(openai.BadRequestError, match="nested more than 64"):
        client.completions.create(model="tiny", prompt="x", extra_body={"guided_json": schema})


def test_the_model_follows_it(nano):
    done = nano.chat.completions.parse(
        model="nano", messages=USER, response_format=Size, temperature=0.8, seed=4, logit_bias={"5": 1}, n=2,
        logprobs=True, top_logprobs=2, frequency_penalty=0.4, max_completion_tokens=500,
    )  # fmt: skip
    assert len(done.choices) == 2
    for choice in done.choices:
        assert choice.finish_reason == "length" or isinstance(choice.message.parsed, Size)


def test_a_stream_follows_it(nano):
    chunks = nano.completions.create(
        model="nano", prompt="answer:", extra_body={"guided_choice": ["yes", "no"]}, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) in ("yes", "no")
