"""Coding agents and their libraries: requests of the forms that they were seen to send, and what they read of answers.

Each body has the fields and kinds of one recorded request, with words of our own.
"""

import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.errors import ConfigError
from afserve.server.bodies.changing_lines import ChangingLines
from afserve.server.bodies.fields import Fields
from afserve.server.http.settings import ServerSettings
from afserve.server.surfaces import anthropic, responses
from tests.server.test_tools import roomy, server  # noqa: F401 - fixtures

HEADER = "x-afserve-ignored"
READ = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": READ}}
FLAT = {"type": "function", "name": "read", "description": "Reads.", "parameters": READ, "strict": False}
TYPED = {
    "name": "read",
    "description": "Reads.",
    "input_schema": {"$schema": "https://json-schema.org/draft", **READ},
}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=sdk-cli;"
CACHED = {"cache_control": {"type": "ephemeral"}}


def text(words, **more):
    return {"type": "text", "text": words, **more}


def claude_code(build="1c0", **more):
    return {
        "model": "tiny",
        "max_tokens": 200,
        "system": [text(BILLING.format(build)), text("You are an agent.", **CACHED), text("\nBe short.", **CACHED)],
        "messages": [{"role": "user", "content": [text("<system-reminder>\nToday.\n"), text("Hi", **CACHED)]}],
        "tools": [TYPED],
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
        **more,
    }  # fmt: skip


UNKNOWN_MODEL = {  # what Claude Code sends to a model whose name it does not know
    "messages": [
        {"role": "user", "content": [text("Hi", **CACHED)]},
        {"role": "system", "content": "Agents: none."},
    ],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
}
CODEX = {
    "model": "tiny",
    "stream": True,
    "input": [
        {"type": "message", "id": "m", "role": "developer", "content": [{"type": "input_text", "text": "You code."}]},
        {"type": "message", "id": "msg_2", "role": "developer", "content": [
            {"type": "input_text", "text": "Skills: none."}, {"type": "input_text", "text": "Sandbox."},
        ]},
        {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    ],
    "tools": [
        FLAT,
        {"type": "namespace", "name": "agents_v1", "description": "Other agents.", "tools": [
            {"type": "function", "name": "close", "description": "Closes.", "parameters": READ, "strict": False},
        ]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"turn_id": "t"},
}  # fmt: skip
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
KNOWN_MODEL = {  # what Codex sends to a model whose name it knows
    "tools": [
        FLAT,
        PATCH,
        {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": {}},
    ],
    "reasoning": {"effort": "medium"},
    "text": {"verbosity": "low"},
}
# Client, path, body, what is passed over.
SEEN = [
    ("Claude Code", "/v1/messages?beta=true", claude_code(), {"thinking", "context_management"}),
    ("Claude Code", "/v1/messages?beta=true", claude_code(**UNKNOWN_MODEL),
     {"thinking", "context_management", "output_config.effort"}),
    ("Codex", "/v1/responses", CODEX, {"tools.web_search"}),
    ("Codex", "/v1/responses", {**CODEX, **KNOWN_MODEL},
     {"tools.apply_patch.format", "tools.tool_search", "text.verbosity", "reasoning.effort"}),
    ("opencode", "/v1/chat/completions", {
        "model": "tiny", "max_tokens": 200, "messages": [
            {"role": "system", "content": "You code."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}},
            ]},
            {"role": "tool", "tool_call_id": "call_1", "content": "teal"},
        ], "tools": [FUNCTION], "tool_choice": "auto", "stream": True, "stream_options": {"include_usage": True},
    }, set()),
    ("Vercel AI SDK, openai-compatible", "/v1/chat/completions", {
        "model": "tiny", "max_tokens": 200, "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}},
            ]},
            {"role": "tool", "tool_call_id": "call_1", "content": "teal"},
        ], "tools": [FUNCTION], "tool_choice": "auto", "stream": True,
    }, set()),
    ("Vercel AI SDK, anthropic", "/v1/messages", {
        "model": "tiny", "max_tokens": 1224, "thinking": {"type": "enabled", "budget_tokens": 1024}, "messages": [
            {"role": "user", "content": [text("Hi")]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "teal"}]},
        ], "tools": [{**TYPED, "eager_input_streaming": True}], "tool_choice": {"type": "auto"}, "stream": True,
    }, {"thinking"}),
    ("pydantic-ai", "/v1/chat/completions", {
        "model": "tiny", "stream": False, "messages": [{"role": "user", "content": "Hi"}], "tool_choice": "auto",
        "tools": [{"type": "function", "function": {**FUNCTION["function"], "strict": True}}],
    }, set()),
    ("pydantic-ai", "/v1/responses", {
        "model": "tiny", "stream": False, "tool_choice": "auto", "tools": [{**FLAT, "description": None}], "input": [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "name": "read", "arguments": '{"path":"a"}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "teal"},
        ],
    }, set()),
    ("LangChain", "/v1/chat/completions", {
        "model": "tiny", "stream": False, "messages": [{"role": "user", "content": "Hi"}], "tools": [FUNCTION],
    }, set()),
    ("LangChain", "/v1/responses", {
        "model": "tiny", "stream": False, "input": [{"type": "message", "role": "user", "content": "Hi"}],
        "reasoning": {"effort": "low"}, "tools": [FLAT],
    }, {"reasoning.effort"}),
    ("aider", "/v1/chat/completions", {
        "model": "tiny", "stream": True, "temperature": 0, "messages": [
            {"role": "system", "content": "You edit."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Ok."}, {"role": "user", "content": "Go"},
        ],
    }, set()),
    ("anthropic-sdk-python", "/v1/messages", {
        "model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}], "tools": [TYPED],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }, {"thinking"}),
    ("ollama-js", "/api/chat", {
        "model": "tiny:latest", "messages": [{"role": "user", "content": "Hi"}], "think": True, "stream": False,
    }, {"think"}),
    ("ollama-js", "/api/generate", {
        "model": "tiny", "prompt": "Hi", "raw": True, "options": {"num_predict": 4, "mirostat": 1}, "stream": False,
    }, {"options.mirostat"}),
    ("ollama-python", "/api/chat", {
        "model": "tiny", "stream": False, "keep_alive": "5m", "messages": [{"role": "user", "content": "Hi"}],
        "tools": [],
    }, {"keep_alive"}),
]  # fmt: skip


@pytest.fixture
def http(server):  # noqa: F811
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def prompt_text(server):  # noqa: F811
    ids = server.backend.requests[-1].prompt_ids
    return server.backend.tokenizer.decode(ids, skip_special_tokens=False)


def events(reply):
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "path", "body", "ignored"), SEEN, ids=[f"{each[0]} {each[1]}" for each in SEEN]
)
def test_a_request_that_a_client_was_seen_to_send(http, server, client, path, body, ignored):  # noqa: F811
    said = http.post(path, json=body)
    assert said.status_code == 200, (client, said.text)
    assert set(filter(None, said.headers.get(HEADER, "").split(", "))) == ignored
    assert server.backend.reply[:4] in said.text or server.backend.reply.strip() in said.text


@pytest.mark.slow
def test_the_prompt_of_claude_code(http, server):  # noqa: F811
    """Its billing header is not in it, and what it says between messages is in the user's turn."""
    http.post("/v1/messages", json=claude_code(**UNKNOWN_MODEL))
    told = prompt_text(server)
    assert "billing" not in told and "You are an agent.\n\nBe short." in told
    assert told.endswith(
        "<|user|>Hi\n\n<system-reminder>\nAgents: none.\n</system-reminder><|end|><|assistant|>"
    )


def test_two_questions_of_claude_code_have_one_beginning(http, server):  # noqa: F811
    prompts = []
    for build in ("1c0", "6e2; cch=5f3a"):
        http.post("/v1/messages", json=claude_code(build))
        prompts.append(server.backend.requests[-1].prompt_ids)
        count = http.post("/v1/messages/count_tokens", json=claude_code(build)).json()["input_tokens"]
        assert count == len(prompts[-1])
    assert prompts[0] == prompts[1]


@given(
    header=st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"])),
    space=st.sampled_from(["", " ", "\n", "\t\n"]),
    rest=st.text(st.characters(exclude_categories=["Cs"])),
    blocks=st.booleans(),
    name=st.sampled_from(["x-anthropic-billing-header", "X-Anthropic-Billing-Header"]),
)
@settings(max_examples=300, deadline=None)
def test_a_billing_header_is_one_line_in_front(header, space, rest, blocks, name):
    """Whatever it says; what follows is kept as it is, and what only mentions it, too."""
    line = f"{space}{name}:{header}"
    value = [text(f"{line}\n{rest}"), text(line), text("Be short.")] if blocks else f"{line}\n{rest}"
    asked = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "system": value}
    lines = ChangingLines(["x-anthropic-billing-header"])
    first = anthropic.translate(Fields(lines.left_out(asked))).body["messages"][0]
    kept = [each for each in (rest, "Be short.") if each] if blocks else [rest]
    assert first == (
        {"role": "system", "content": "\n".join(kept)} if any(kept) else {"role": "user", "content": "x"}
    )
    mention = f"See the {name}: {header}"
    for untouched in ({**asked, "system": mention}, {"messages": [{"role": "user", "content": value}]}):
        assert lines.left_out(untouched) is untouched
    assert ChangingLines([]).left_out(asked) is asked


LINE = "x-anthropic-billing-header: cc=1;"
WITH_LINES = [
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": f"{LINE}\nBe short."}]}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": [text(LINE), text("Be short.")]}]}),
    ("/v1/responses", {"instructions": f"{LINE}\nBe short.", "input": "Hi"}),
    ("/v1/responses", {"input": [{"role": "developer", "content": [{"type": "input_text", "text": LINE}]}]}),
    ("/api/generate", {"system": f"{LINE}\nBe short.", "prompt": "Hi", "stream": False}),
]


@pytest.mark.parametrize(("path", "body"), WITH_LINES)
def test_changing_lines_enter_no_prompt_of_any_api(http, server, path, body):  # noqa: F811
    said = http.post(path, json={"model": "tiny", **body})
    assert said.status_code == 200, said.text
    assert "billing" not in prompt_text(server)
    if path == "/v1/responses" and "instructions" in body:
        followed = {**body, "previous_response_id": said.json()["id"]}
        assert http.post(path, json={"model": "tiny", **followed}).status_code == 200
        assert "billing" not in prompt_text(server) and "Be short." in prompt_text(server)


def test_which_lines_change_is_a_setting(make_backend, run_server):
    """It is told, other names may be given, and it can be switched off."""
    system = {
        "system": f"{LINE}\nX-Run: 7\nBe short.",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "x"}],
    }
    for names, kept in ((("X-Run", "x-anthropic-billing-header"), ""), (("off",), f"{LINE}\nX-Run: 7\n")):
        with (
            run_server(make_backend(), changing_lines=names) as one,
            httpx.Client(base_url=one.url, timeout=20) as client,
        ):
            assert client.post("/v1/messages", json=system).status_code == 200
            assert f"<|system|>{kept}Be short." in prompt_text(one)
            assert client.get("/tokenizer_info").json()["changing_lines"] == ([*names] if not kept else [])
    with pytest.raises(ConfigError, match="changing-lines"):
        ServerSettings(changing_lines=("no name",))


def test_a_stream_of_messages_counts_its_cache_from_the_start(http):
    began, *_, delta, _ = events(http.post("/v1/messages", json=claude_code()))
    first, last = began["message"]["usage"], delta["usage"]
    assert first["cache_read_input_tokens"] == 2 and first["input_tokens"] == 0  # it marks its prompt
    kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    counted = http.post("/v1/messages/count_tokens", json=claude_code()).json()["input_tokens"]
    assert sum(first[kind] for kind in kinds) == sum(last[kind] for kind in kinds) == counted
    assert first["output_tokens"] == 0 < last["output_tokens"]


def test_lengths_are_refused_in_the_words_that_clients_read(http):
    count = http.post("/v1/messages/count_tokens", json=claude_code()).json()["input_tokens"]
    said = http.post("/v1/messages", json=claude_code(max_tokens=32_000)).json()["error"]["message"]
    assert said.startswith(f"input length and `max_tokens` exceed context limit: {count} + 32000 > 2048, ")
    for words in ("hello " * 2500, "hello " * 100_000):  # one is counted, the other one estimated
        long = {**claude_code(), "messages": [{"role": "user", "content": words}]}
        said = http.post("/v1/messages", json=long).json()
        kind, told, most = said["error"]["type"], *said["error"]["message"].split(" tokens > ")
        assert kind == "invalid_request_error" and most == "2048 maximum"
        assert told.startswith("prompt is too long: ") and int(told.rsplit(" ", 1)[1]) > 2048
        assert http.post("/v1/messages/count_tokens", json=long).json()["input_tokens"] > 2048
    for path, asked in (
        ("chat/completions", {"messages": long["messages"]}),
        ("responses", {"input": "hello " * 2500}),
    ):
        error = http.post(f"/v1/{path}", json=asked).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "this model's maximum context length is 2048 tokens" in error["message"]


def test_a_call_into_a_namespace(http, server):  # noqa: F811
    """The model sees one name; the client gets two, in the item, in its events, and may send both back."""
    server.backend.reply = call("agents_v1__close", {"path": "a"})
    told = events(http.post("/v1/responses", json=CODEX))
    items = [each["item"] for each in told if each["type"].startswith("response.output_item")]
    assert all((each["namespace"], each["name"]) == ("agents_v1", "close") for each in items)
    (item,) = told[-1]["response"]["output"]
    assert item == items[-1] and json.loads(item["arguments"]) == {"path": "a"}
    assert '"agents_v1__close"' in prompt_text(server) and "Other agents.\\n\\nCloses." in prompt_text(server)
    assert "namespace" not in prompt_text(server)
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "closed"}
    again = http.post("/v1/responses", json={**CODEX, "input": [*CODEX["input"], item, result]})
    assert again.status_code == 200 and "<|tool|>closed<|end|>" in prompt_text(server)
    named = {"type": "function", "name": "close", "namespace": "agents_v1"}
    server.backend.reply = '{"path": "b"}'
    (chosen,) = http.post("/v1/responses", json={**CODEX, "stream": False, "tool_choice": named}).json()[
        "output"
    ]
    assert (chosen["namespace"], chosen["name"], chosen["arguments"]) == (
        "agents_v1",
        "close",
        '{"path": "b"}',
    )


def test_refusals_inside_a_namespace_have_their_place(http):
    for member, param in (
        ({"type": "function", "name": "n o"}, "tools[0].tools[1].name"),
        ({"type": "function", "name": "f", "parameters": 5}, "tools[0].tools[1].parameters"),
        ({"type": "namespace", "name": "f", "tools": []}, "tools[0].tools[1].type"),
    ):
        space = {"type": "namespace", "name": "s", "tools": [FLAT, member]}
        said = http.post("/v1/responses", json={"input": "x", "tools": [space]})
        assert (said.status_code, said.json()["error"]["param"]) == (400, param), said.text
    twice = {"type": "namespace", "name": "s", "tools": [FLAT, FLAT]}
    assert http.post("/v1/responses", json={"input": "x", "tools": [twice]}).status_code == 400


@given(words=st.text(st.characters(exclude_categories=["Cs"]), max_size=200), cut=st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_free_text_of_a_custom_tool_comes_back(words, cut):
    from afserve.server.surfaces.response_tools import free_arguments, free_text

    whole = free_arguments(words)
    assert free_text(whole) == words
    assert words.startswith(free_text(whole[:cut]).rstrip("\\")) or free_text(whole[:cut]) == ""


def test_a_custom_tool(http, server):  # noqa: F811
    patch = '*** Begin Patch\n+"quoted"\n*** End Patch'
    server.backend.reply = call("apply_patch", {"input": patch})
    body = {**CODEX, **KNOWN_MODEL}
    told = events(http.post("/v1/responses", json=body))
    (item,) = told[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"], item["status"]) == (
        "custom_tool_call", "apply_patch", patch, "completed",
    )  # fmt: skip
    kinds = [each["type"] for each in told]
    assert kinds[-4:-1] == [
        "response.custom_tool_call_input.delta", "response.custom_tool_call_input.done", "response.output_item.done",
    ]  # fmt: skip
    assert "lark grammar" in prompt_text(server)
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "patched"}
    again = http.post("/v1/responses", json={**body, "input": [*CODEX["input"], item, result]})
    assert again.status_code == 200 and prompt_text(server).endswith("<|tool|>patched<|end|><|assistant|>")
    server.backend.reply = json.dumps({"input": "x"})
    chosen = {**body, "stream": False, "tool_choice": {"type": "custom", "name": "apply_patch"}}
    assert http.post("/v1/responses", json=chosen).json()["output"][0]["input"] == "x"
    chosen["tool_choice"] = {"type": "custom", "name": "read"}  # a function
    assert http.post("/v1/responses", json=chosen).status_code == 400


def test_instructions_that_follow_one_another_are_one_message(http, server):  # noqa: F811
    http.post("/v1/responses", json={**CODEX, "instructions": "First.", "tools": []})
    assert prompt_text(server) == (
        "<|system|>First.\n\nYou code.\n\nSkills: none.Sandbox.<|end|><|user|>Hi<|end|><|assistant|>"
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reply", "kind"),
    [("words and more words", "message"), (call("read", {"path": "a" * 99}), "function_call")],
)
def test_an_item_that_is_cut_is_incomplete(http, server, reply, kind, stream):  # noqa: F811
    """An agent runs what is completed."""
    server.backend.reply = reply
    body = {"input": "x", "tools": [FLAT], "max_output_tokens": 30 if kind == "function_call" else 3}
    said = http.post("/v1/responses", json={**body, "stream": stream})
    response = events(said)[-1]["response"] if stream else said.json()
    assert response["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in response["output"]] == [(kind, "incomplete")]
    if stream:
        done = [each["item"] for each in events(said) if each["type"] == "response.output_item.done"]
        assert [item["status"] for item in done] == ["incomplete"]
    server.backend.reply = "short"
    whole = http.post("/v1/responses", json={"input": "x"}).json()
    assert [item["status"] for item in whole["output"]] == ["completed"]


def test_an_answer_says_what_was_used(http):
    said = http.post("/v1/responses", json={"input": "x", "top_p": 0.5, "service_tier": "auto"}).json()
    assert (said["temperature"], said["top_p"], said["service_tier"]) == (1.0, 0.5, "default")
    asked = {"messages": [{"role": "user", "content": "x"}], "service_tier": "flex"}
    chat = http.post("/v1/chat/completions", json=asked).json()
    assert chat["service_tier"] == "flex" and chat["system_fingerprint"].startswith("fp_")
    details = chat["usage"]["completion_tokens_details"]
    assert details == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(
        http.post("/v1/chat/completions", json={**asked, "stream": True, "stream_options": options})
    )
    assert {chunk["system_fingerprint"] for chunk in chunks} == {chat["system_fingerprint"]}
    assert all(chunk["usage"]["completion_tokens_details"] == details for chunk in chunks)


def test_contexts_in_every_clients_words(http):
    (model,) = http.get("/v1/models").json()["data"]
    names = ("context_length", "context_window", "max_model_len", "max_input_tokens", "max_tokens")
    assert {model[name] for name in names} == {2048}
    version = {"anthropic-version": "2023-06-01"}
    page = http.get("/v1/models", headers=version).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("tiny", "tiny", False)
    assert page["data"] == [http.get("/v1/models/tiny", headers=version).json()]
    assert page["data"][0] == {
        "type": "model", "id": "tiny", "display_name": "tiny", "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active", "max_input_tokens": 2048, "max_tokens": 2048,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/response", "/v1/responses"),
        ("/v1/api/tags", "/api/tags"),
        ("/api/tag", "/api/tags"),
        ("/models", "/v1/models"),
        ("/v1/messages/", "/v1/messages"),
    ],
)
def test_an_unknown_route_names_the_closest(http, path, route):
    said = http.post(path, json={})
    message = said.json()["error"]
    message = message if isinstance(message, str) else message["message"]
    assert said.status_code == 404 and message.startswith(f"there is no POST '{path}'; see {route}"), message


def test_an_unknown_route_like_none(http):
    said = http.get("/x" * 5000)
    assert said.status_code == 404 and len(said.text) < 1000 and "GET /docs" in said.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "told"),
    [
        ([], "<|system|>Now.\n\nThen.<|end|><|user|>Hi<|end|>"),
        ([{"role": "user", "content": "A"}], "<|user|>A\n\n{0}\n\n{1}<|end|><|user|>Hi<|end|>"),
        (
            [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}],
            "<|user|>A<|end|><|assistant|>B<|end|><|user|>{0}\n\n{1}<|end|><|user|>Hi<|end|>",
        ),
    ],
)
def test_instructions_between_messages(http, server, before, told):  # noqa: F811
    """In front they are the system's, behind others the user's."""
    reminded = [f"<system-reminder>\n{each}\n</system-reminder>" for each in ("Now.", "Then.")]
    messages = [
        *before,
        {"role": "system", "content": "Now."},
        {"role": "system", "content": [text("Then.")]},
    ]
    body = {"model": "tiny", "max_tokens": 9, "messages": [*messages, {"role": "user", "content": "Hi"}]}
    assert http.post("/v1/messages", json=body).status_code == 200
    assert prompt_text(server) == told.format(*reminded) + "<|assistant|>"


@pytest.mark.slow
def test_an_items_reasoning_is_the_next_messages(http, server):  # noqa: F811
    """Not that of the one before, where an item between them is passed over."""
    thought = {
        "type": "reasoning",
        "id": "rs",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    items = [
        {"role": "assistant", "content": "A"},
        thought,
        {"type": "web_search_call", "id": "ws"},
        {
            "type": "local_shell_call",
            "id": "ls",
            "call_id": "c",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "local_shell_call_output", "id": "c", "output": "a.py"},
    ]
    found = responses.translate(Fields({"input": items}), []).body["messages"]
    assert [message["role"] for message in found] == ["assistant", "tool"]
    (shell,) = found[0]["tool_calls"]
    assert (shell["id"], shell["function"]["name"]) == ("c", "local_shell")
    assert json.loads(shell["function"]["arguments"])["command"] == ["ls"]
    assert found[0]["reasoning_content"] == "Hm." and found[1]["content"] == "a.py"
