"""Structured output through the official client: what is asked reaches the engine as a grammar, and is followed."""

import json

import httpx
import openai
import pytest
from pydantic import BaseModel

from afserve.tokens.tokenizer import Tokenizer
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
    from afserve.server.http.settings import ServerSettings
    from tests.server.conftest import Server

    server = Server(NanoBackend(), Tokenizer.from_folder(FOLDER), ServerSettings())
    server.start()
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client
    finally:
        server.stop()


@pytest.mark.slow
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


EXPLOSIVE = "(a?){600}a{600}"
IN_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": f"^{EXPLOSIVE}$"}},
    "required": ["a"],
}
EMPTIED = {"properties": {"score": {}}, "required": ["score"], "patternProperties": {"^score$": {}}}
GRAMMAR = "root ::= " + " ".join(['("a"|"aa")*'] * 200)
FINE = {"type": "function", "function": {"name": "fine"}}


def tool(schema, **more):
    return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}


@pytest.mark.parametrize(
    "param, extra",
    [
        ("guided_regex", {"guided_regex": EXPLOSIVE}),
        ("guided_regex", {"guided_regex": "a{1000}{1000}"}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": EXPLOSIVE}}),
        ("guided_grammar", {"guided_grammar": GRAMMAR}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": 'root ::= "a" root'}}),
        ("guided_json", {"guided_json": IN_SCHEMA}),
        ("structured_outputs.json", {"structured_outputs": {"json": json.dumps(EMPTIED)}}),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": IN_SCHEMA}}},
        ),
        ("tools[1].function.parameters", {"tools": [FINE, tool(IN_SCHEMA)], "tool_choice": "required"}),
        ("tools[1].function.parameters", {"tools": [FINE, tool(EMPTIED)], "tool_choice": "required"}),
        (
            "tools[0].function.parameters",
            {"tools": [tool({"$ref": "#/no"}), FINE], "tool_choice": "required"},
        ),
        (
            "tools[0].function.parameters",
            {"tools": [tool(IN_SCHEMA)], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ("guided_choice", {"guided_choice": ["a", "\ud800"]}),
        ("guided_regex", {"guided_regex": "\udfff"}),
        ("guided_grammar", {"guided_grammar": 'start: "\ud800"'}),
        ("guided_json", {"guided_json": {"const": "\ud800"}}),
    ],
)
def test_what_cannot_be_followed_is_refused_before_it_begins(http, server, param, extra):
    for stream in (False, True):
        body = json.dumps({"model": "tiny", "messages": USER, "stream": stream, **extra})
        reply = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert error["message"].startswith(f"{param}: ") and len(error["message"]) < 400
    assert server.backend.requests == []


@pytest.mark.parametrize(
    "path, field, body",
    [
        (
            "/v1/messages",
            "tools[0].input_schema",
            {
                "messages": USER,
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": IN_SCHEMA}],
                "tool_choice": {"type": "any"},
            },
        ),
        (
            "/v1/messages",
            "output_config.format.schema",
            {
                "messages": USER,
                "max_tokens": 9,
                "output_config": {"format": {"type": "json_schema", "schema": IN_SCHEMA}},
            },
        ),
        (
            "/v1/responses",
            "text.format.schema",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": EMPTIED}}},
        ),
        (
            "/v1/responses",
            "tools[0].parameters",
            {
                "input": "x",
                "tools": [{"type": "function", "name": "f", "parameters": IN_SCHEMA}],
                "tool_choice": "required",
            },
        ),
        ("/api/chat", "format", {"messages": USER, "format": IN_SCHEMA}),
        ("/api/generate", "format", {"prompt": "x", "format": EMPTIED}),
        ("/v1/completions", "guided_regex", {"prompt": "x", "guided_regex": EXPLOSIVE}),
    ],
)
def test_so_on_every_surface(http, server, path, field, body):
    reply = http.post(path, json={"model": "tiny", **body})
    said = reply.json()["error"]
    assert reply.status_code == 400
    assert (said if isinstance(said, str) else said["message"]).startswith(f"{field}: ")
    assert server.backend.requests == []


@pytest.mark.parametrize(
    "extra",
    [
        {"guided_choice": ["\u007f"]},
        {"guided_choice": ["\u0000", "\u0085", "\u2028"]},
        {"guided_json": {"type": "string", "format": "password"}},
        {
            "guided_json": {
                "type": "array",
                "items": {"type": "string", "format": "uri-reference"},
                "uniqueItems": False,
            }
        },
        {"guided_json": {"type": "object", "propertyNames": {"type": "string"}, "dependentRequired": {}}},
    ],
)
def test_what_asks_for_nothing_is_no_reason_to_refuse(client, server, extra):
    client.completions.create(model="tiny", prompt="x", extra_body=extra)
    assert server.backend.requests[0].params.grammar


@pytest.fixture
def narrow(monkeypatch):
    """Engines that give up where repetitions begin; what is tried beforehand has all that it needs."""
    from llguidance import LLParserLimits

    import afserve.grammars.grammar

    limits = LLParserLimits(step_lexer_fuel=3000, verbose_errors=False)
    monkeypatch.setattr(afserve.grammars.grammar, "engine_limits", lambda: limits)


LATE = r"[ab]{12}(\w{0,9} ?){20}"
IN_CALLS = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": f"^{LATE}$"}},
    "required": ["a"],
}
CHAT = {"messages": USER, "max_tokens": 80}
FORM = {"format": {"type": "json_schema", "name": "n", "schema": IN_CALLS}}
FORCED = {"tools": [tool(IN_CALLS)], "tool_choice": "required"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, field, body",
    [
        ("/v1/completions", "guided_regex", {"prompt": "x", "max_tokens": 80, "guided_regex": LATE}),
        ("/v1/chat/completions", "structured_outputs.regex", {**CHAT, "structured_outputs": {"regex": LATE}}),
        ("/v1/chat/completions", "tools", {**CHAT, **FORCED}),
        ("/v1/messages", "output_config.format.schema", {**CHAT, "output_config": FORM}),
        ("/v1/responses", "text.format.schema", {"input": "x", "text": FORM}),
        ("/api/chat", "format", {"messages": USER, "format": IN_CALLS}),
    ],
)
def test_an_answer_that_cannot_go_on_ends_with_the_clients_error(narrow, nano, path, field, body):
    asked = {"model": "nano", "temperature": 1, "seed": 5, **body}
    asked |= {"options": {"temperature": 1, "seed": 5}} if path.startswith("/api") else {}
    with httpx.Client(base_url=str(nano.base_url).removesuffix("/v1/"), timeout=60) as http:
        whole = http.post(path, json={**asked, "stream": False})
        told = http.post(path, json={**asked, "stream": True}).text
    assert whole.status_code == 400, whole.text
    error = whole.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"{field}: not a grammar that can be followed")
    assert isinstance(error, str) or error["type"] == "invalid_request_error"
    assert isinstance(error, str) or error.get("param", field) == field
    assert message in told, told
    assert not any(kind in told for kind in ("internal_error", "model_error", "api_error", "server_error"))


@pytest.mark.slow
def test_the_model_follows_it(nano):
    done = nano.chat.completions.parse(
        model="nano", messages=USER, response_format=Size, temperature=0.8, seed=4, logit_bias={"5": 1}, n=2,
        logprobs=True, top_logprobs=2, frequency_penalty=0.4, max_completion_tokens=500,
    )  # fmt: skip
    assert len(done.choices) == 2
    for choice in done.choices:
        assert choice.finish_reason == "length" or isinstance(choice.message.parsed, Size)


@pytest.mark.slow
def test_a_stream_follows_it(nano):
    chunks = nano.completions.create(
        model="nano", prompt="answer:", extra_body={"guided_choice": ["yes", "no"]}, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) in ("yes", "no")
