"""Tools and reasoning through the official client."""

import json
from dataclasses import fields, replace

import openai
import pytest

from afserve.grammars.grammar import Compiler
from tests.server.test_structured import nano  # noqa: F401 - a fixture

USER = [{"role": "user", "content": "hello"}]
FORECAST = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Bern", "Basel"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "forecast", "parameters": FORECAST}},
    {"type": "function", "function": {"name": "time", "description": "What time it is."}},
]
CALLS = (
    'One moment. <tool_call>\n{"name": "forecast", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def roomy(make_backend, run_server):
    """A server whose model has room for the words of tools."""
    backend = make_backend()
    backend.model = replace(backend.model, max_model_len=2048)
    with run_server(backend) as running:
        yield running


@pytest.fixture
def server(roomy, make_backend):
    fresh, model = make_backend(), roomy.backend.model
    for each in fields(fresh):
        setattr(roomy.backend, each.name, getattr(fresh, each.name))
    roomy.backend.model = model
    return roomy


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, **given):
    return client.chat.completions.create(**{"model": "tiny", "messages": USER, "tools": TOOLS, **given})


@pytest.mark.slow
def test_two_calls_of_one_answer(client, server):
    server.backend.reply = CALLS
    choice = ask(client).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "One moment. "
    calls = choice.message.tool_calls
    assert [c.function.name for c in calls] == ["forecast", "time"]
    assert [json.loads(c.function.arguments) for c in calls] == [{"city": "Bern", "days": 2}, {}]
    assert len({c.id for c in calls}) == 2


@pytest.mark.slow
def test_calls_come_as_they_are_written(client, server):
    server.backend.reply = CALLS
    with client.chat.completions.stream(model="tiny", messages=USER, tools=TOOLS) as stream:
        events = list(stream)
    arguments = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert len(arguments) > 4
    final = events[-1] if hasattr(events[-1], "choices") else stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert [c.function.name for c in calls] == ["forecast", "time"]
    assert json.loads(calls[0].function.arguments) == {"city": "Bern", "days": 2}
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.slow
def test_a_strict_function_is_held_to_its_schema(client, server):
    strict = {"type": "function", "function": {"name": "forecast", "parameters": FORECAST, "strict": True}}
    ask(client, tools=[strict, TOOLS[1]])
    tokenizer, model = server.backend.tokenizer, server.backend.model
    compiled = Compiler(model.path, model.vocab_size, (1,)).compile(server.backend.requests[0].params.grammar)

    def follows(text):
        matcher = compiled.copy()
        return all(
            matcher.allows(t) and matcher.consume([t]) is None for t in tokenizer.encode(text)
        ), matcher

    assert follows("Hello.")[1].allows(1)
    assert follows(CALLS)[0] and follows(CALLS.replace("Bern", "Basel"))[0]
    assert not follows(CALLS.replace("Bern", "Rome"))[0]
    assert not follows(CALLS.replace("forecast", "weather"))[0]


NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "child"],
}
ROUTE = {
    "type": "object",
    "properties": {
        "start": {"type": "object", "properties": {"n/s": {"enum": ["a", "b"]}}, "required": ["n/s"]},
        "end": {"$ref": "#/properties/start"},
        "via": {"type": "array", "items": {"$ref": "#/properties/start/properties/n~1s"}},
    },
    "required": ["start", "end", "via"],
}
TREES = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("node", NODE), ("route", ROUTE), ("forecast", FORECAST))
]
GOOD = {
    "node": {"v": 1, "child": {"v": 2, "child": None}},
    "route": {"start": {"n/s": "a"}, "end": {"n/s": "b"}, "via": ["a"]},
    "forecast": {"city": "Bern", "days": 2},
}
BAD = {
    "node": [{"v": 1, "child": []}, {"v": 1, "child": {"v": 2}}, {"v": 1, "child": None, "z": 1}],
    "route": [
        {**GOOD["route"], "end": {"n/s": "c"}},
        {**GOOD["route"], "via": ["c"]},
        {**GOOD["route"], "z": 1},
    ],
    "forecast": [{"city": "Rome", "days": 2}, {"city": "Bern", "days": "x"}],
}


@pytest.mark.slow
@pytest.mark.parametrize("tools", [TREES, TREES[::-1]])
def test_each_function_is_held_to_its_own_schema_wherever_its_references_lead(client, server, tools):
    """Whether any function may be called, or one is named."""
    model, tokenizer = server.backend.model, server.backend.tokenizer
    compiler = Compiler(model.path, model.vocab_size, (1,))

    def follows(compiled, text):
        matcher = compiled.copy()
        for token in tokenizer.encode(text):
            if not matcher.allows(token):
                return False
            matcher.consume([token])
        return matcher.is_complete or matcher.allows(1)

    for name, good in GOOD.items():
        for choice in ("required", {"type": "function", "function": {"name": name}}):
            ask(client, tools=tools, tool_choice=choice)
            compiled = compiler.compile(server.backend.requests[-1].params.grammar)

            def told(arguments, name=name, forced=choice == "required"):
                return json.dumps([{"name": name, "parameters": arguments}] if forced else arguments)

            assert follows(compiled, told(good)), name
            assert not any(follows(compiled, told(bad)) for bad in BAD[name]), name


@pytest.mark.parametrize("parallel, calls", [(None, 1), (False, 1), (True, 2)])
def test_how_many_calls_a_required_answer_may_have(client, server, parallel, calls):
    said = {} if parallel is None else {"parallel_tool_calls": parallel}
    ask(client, tool_choice="required", **said)
    model, tokenizer = server.backend.model, server.backend.tokenizer
    matcher = Compiler(model.path, model.vocab_size, (1,)).compile(server.backend.requests[-1].params.grammar)
    call = '{"name": "time", "parameters": {}}'
    matcher.consume(tokenizer.encode(f"[{call}"))
    assert matcher.allows(tokenizer.encode("]")[0])
    assert matcher.allows(tokenizer.encode(",")[0]) == (calls > 1)


def test_a_response_format_is_not_closed(client, server):
    """There, what a schema does not say is allowed, as JSON Schema has it."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    ask(client, tools=None, response_format=form)
    open_grammar = server.backend.requests[-1].params.grammar
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    ask(client, tools=[tool], tool_choice={"type": "function", "function": {"name": "f"}})
    model, tokenizer = server.backend.model, server.backend.tokenizer
    compiler = Compiler(model.path, model.vocab_size, (1,))
    for grammar, more in ((open_grammar, True), (server.backend.requests[-1].params.grammar, False)):
        matcher = compiler.compile(grammar)
        matcher.consume(tokenizer.encode('{"n": 1'))
        assert matcher.allows(tokenizer.encode(",")[0]) == more


@pytest.mark.parametrize("schema", [{"pattern": "(?=a)b"}, {"$ref": "#/no"}, {"not": {}}])
@pytest.mark.parametrize("given", [{}, {"tool_choice": "required"}])
def test_the_tool_whose_schema_cannot_be_followed_is_named(client, server, schema, given):
    odd = {"type": "object", "properties": {"a": {"type": "string", **schema}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "odd", "parameters": odd, "strict": True}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, tools=[*TOOLS, tool], **given)
    assert refused.value.body["param"] == "tools[2].function.parameters"
    assert server.backend.requests == []


@pytest.mark.parametrize(
    "words, schema",
    [
        ("an object", {"type": "array", "items": {"type": "string"}}),
        ("an object", {"type": "string"}),
        ("an object", {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}}),
        ("could not end", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        ("at most 16384", {"type": "object", "properties": {"a": {"minItems": 10**9}}}),
    ],
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "odd"}}])
def test_arguments_that_could_not_be_written(client, server, words, schema, choice):
    tool = {"type": "function", "function": {"name": "odd", "parameters": schema}}
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        ask(client, tools=[tool], tool_choice=choice)
    assert refused.value.body["param"] == "tools[0].function.parameters"
    assert server.backend.requests == []


@pytest.mark.parametrize("schema", [None, {}, {"properties": {"a": {}}}, {"type": ["object", "null"]}])
def test_arguments_are_held_to_an_object(client, server, schema):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    ask(client, tools=[tool], tool_choice={"type": "function", "function": {"name": "f"}})
    model, tokenizer = server.backend.model, server.backend.tokenizer
    grammar = server.backend.requests[-1].params.grammar
    matcher = Compiler(model.path, model.vocab_size, (1,)).compile(grammar)
    assert [matcher.allows(tokenizer.encode(text)[0]) for text in '{["1n'] == [True] + 4 * [False]


def test_no_parallel_calls(client, server):
    server.backend.reply = CALLS
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_without_tools_the_text_is_text(client, server):
    server.backend.reply = CALLS
    for given in ({"tools": None}, {"tool_choice": "none"}):
        message = ask(client, **given).choices[0].message
        assert message.content == CALLS and message.tool_calls is None


def test_a_required_call_is_a_list(client, server):
    server.backend.reply = (
        '[{"name": "time", "parameters": {}}, {"name": "forecast", "parameters": {"days": 1}}]'
    )
    choice = ask(client, tool_choice="required").choices[0]
    assert choice.message.content is None and choice.finish_reason == "tool_calls"
    assert [c.function.name for c in choice.message.tool_calls] == ["time", "forecast"]
    assert '"forecast"' in server.backend.requests[0].params.grammar


def test_a_named_call_is_its_arguments(client, server):
    server.backend.reply = '{"city": "Basel", "days": 3}'
    named = {"type": "function", "function": {"name": "forecast"}}
    choice = ask(client, tool_choice=named).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "forecast" and json.loads(call.function.arguments)["city"] == "Basel"
    assert choice.finish_reason == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "forecast"}}])
def test_the_model_has_to_call(nano, choice):  # noqa: F811
    done = ask(nano, model="nano", tool_choice=choice, temperature=1, seed=3, parallel_tool_calls=False)
    (call,) = done.choices[0].message.tool_calls
    said = json.loads(call.function.arguments)
    assert call.function.name == "time" or (
        said["city"] in ("Bern", "Basel") and isinstance(said["days"], int)
    )


def test_a_model_whose_template_knows_no_tools_is_told_in_words(nano):  # noqa: F811
    history = [
        *USER,
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "time", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
    ]
    short = ask(nano, model="nano", messages=history, tools=None, max_tokens=1)
    long = ask(nano, model="nano", messages=history, max_tokens=1)
    assert long.usage.prompt_tokens > short.usage.prompt_tokens + 100


@pytest.mark.parametrize(
    "param, given",
    [
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools", {"tools": [TOOLS[1], TOOLS[1]]}),
        ("tools[0].function.parameters", {"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}),
        ("tool_choice", {"tool_choice": "sometimes"}),
        ("tool_choice", {"tools": None, "tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "nobody"}}}),
        ("response_format", {"tool_choice": "required", "response_format": {"type": "json_object"}}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("reasoning_effort", {"extra_body": {"reasoning_effort": "huge"}}),
        ("bad_words", {"extra_body": {"bad_words": ["x"]}}),
        ("best_of", {"extra_body": {"best_of": 3}}),
        ("echo", {"extra_body": {"echo": True}}),
        ("thinking_token_budget", {"extra_body": {"thinking_token_budget": -2}}),
        ("add_special_tokens", {"extra_body": {"add_special_tokens": True}}),
        ("messages[0].function_call", {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}),
        ("add_generation_prompt", {"extra_body": {"add_generation_prompt": True, "continue_final_message": True}}),
        ("chat_template_kwargs.messages", {"extra_body": {"chat_template_kwargs": {"messages": USER}}}),
        ("chat_template_kwargs.tools", {"extra_body": {"chat_template_kwargs": {"tools": False}}}),
        ("messages[0].audio", {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("service_tier", {"extra_body": {"service_tier": "gold"}}),
        ("cache_salt", {"extra_body": {"cache_salt": "x" * 300}}),
        ("priority", {"extra_body": {"priority": 1 << 30}}),
        ("deadline", {"extra_body": {"deadline": 0}}),
    ],
)  # fmt: skip
def test_refused_by_name(client, server, param, given):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **given)
    assert refused.value.body["param"] == param, refused.value.body
    assert server.backend.requests == []


def test_fields_that_ask_for_nothing_are_fine(client):
    ask(client, modalities=["text"], store=False, extra_body={"use_beam_search": False, "bad_words": []})


@pytest.mark.slow
def test_turn_and_salt_reach_the_engine(client, server):
    ask(client, extra_body={"cache_salt": "mine"}, service_tier="flex")
    ask(client, extra_body={"priority": -5})
    flex, first = server.backend.requests
    assert (flex.priority, flex.cache_salt) == (100, "mine") and first.priority == -5


@pytest.mark.slow
def test_a_deadline_ends_the_answer(client, server):
    server.backend.hold_at = 2
    try:
        with pytest.raises(openai.InternalServerError, match="deadline"):
            ask(client, extra_body={"deadline": 0.2})
        with pytest.raises(openai.APIError, match="deadline"):
            list(ask(client, extra_body={"deadline": 0.2}, stream=True))
    finally:
        server.backend.release.set()
