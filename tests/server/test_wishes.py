"""Wishes that nobody follows are passed over by name, promises of a form are refused: in every API, in streams too."""

import logging

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.errors import RequestError
from afserve.server.bodies import unsupported
from afserve.server.bodies.fields import Fields
from afserve.server.replies.ignored import MOST_NAMES, Ignored, told_names
from tests.server.test_tools import TOOLS, roomy, server  # noqa: F401 - fixtures

HEADER = "x-afserve-ignored"
USER = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/api/chat": {"messages": USER},
    "/api/generate": {"prompt": "hello"},
}
OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
# Of each kind of wish some, in the words of the API that has it.
WISHES = [
    ("/v1/chat/completions", "verbosity", {"verbosity": "low"}),
    ("/v1/chat/completions", "store", {"store": True}),
    ("/v1/chat/completions", "reasoning_effort", {"reasoning_effort": "low"}),
    ("/v1/chat/completions", "thinking_token_budget", {"thinking_token_budget": 0}),
    ("/v1/chat/completions", "thinking", {"thinking": {"type": "disabled"}}),
    ("/v1/chat/completions", "enable_thinking", {"enable_thinking": False}),
    ("/v1/chat/completions", "reasoning", {"reasoning": {"effort": "high"}}),
    ("/v1/chat/completions", "web_search_options", {"web_search_options": {}}),
    ("/v1/chat/completions", "tools.web_search", {"tools": [{"type": "web_search"}]}),
    ("/v1/completions", "use_beam_search", {"use_beam_search": True}),
    ("/v1/responses", "truncation", {"truncation": "auto"}),
    ("/v1/responses", "reasoning.effort", {"reasoning": {"effort": "xhigh"}}),
    ("/v1/responses", "reasoning.summary", {"reasoning": {"summary": "detailed"}}),
    ("/v1/responses", "reasoning.mode", {"reasoning": {"mode": "pro"}}),
    ("/v1/responses", "text.verbosity", {"text": {"verbosity": "low"}}),
    ("/v1/responses", "context_management", {"context_management": [{"type": "compaction"}]}),
    ("/v1/responses", "max_tool_calls", {"max_tool_calls": 3}),
    ("/v1/responses", "include", {"include": ["web_search_call.action.sources"]}),
    ("/v1/responses", "tools.mcp", {"tools": [{"type": "mcp", "server_label": "x", "connector_id": "c"}]}),
    ("/v1/responses", "tools.tool_search", {"tools": [{"type": "tool_search", "parameters": {}}]}),
    *(
        ("/v1/responses", f"tools.{kind}", {"tools": [{"type": kind}]})
        for kind in ("web_search_preview", "image_generation", "file_search", "code_interpreter", "local_shell")
    ),
    ("/v1/responses", "input.web_search_call", {"input": [*USER, {"type": "web_search_call", "id": "ws"}]}),
    ("/v1/messages", "context_management", {"context_management": {"edits": []}}),
    ("/v1/messages", "thinking", {"thinking": {"type": "enabled", "budget_tokens": 31_999}}),
    ("/v1/messages", "thinking", {"thinking": {"type": "adaptive"}}),
    ("/v1/messages", "output_config.effort", {"output_config": {"effort": "low"}}),
    ("/v1/messages", "output_config.effort, thinking", {
        "output_config": {"effort": "max"}, "thinking": {"type": "adaptive"},
    }),
    ("/v1/messages", "mcp_servers", {"mcp_servers": [{"type": "url", "url": "https://x.example", "name": "x"}]}),
    ("/v1/messages", "container", {"container": "c"}),
    ("/v1/messages", "tools.web_search_20250305", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("/v1/messages", "tools.bash_20250124", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("/v1/messages", "tools[0].defer_loading, tools.tool_search_tool_bm25_20251119", {"tools": [
        {"name": "f", "input_schema": {}, "defer_loading": True},
        {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
    ]}),
    ("/v1/messages", "messages.server_tool_use", {"messages": [*USER, {"role": "assistant", "content": [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, {"type": "text", "text": "x"},
    ]}, *USER]}),
    ("/api/chat", "options.mirostat", {"options": {"mirostat": 2, "mirostat_eta": 0.1}}),
    ("/api/chat", "options.mirostat_tau", {"options": {"mirostat_tau": 3}}),
    ("/api/chat", "options", {"options": {"what\r\nx-evil": 1}}),
    ("/api/chat", "think", {"think": True}),
    ("/api/chat", "think", {"think": "high"}),
    ("/api/chat", "keep_alive", {"keep_alive": "5m"}),
    ("/api/generate", "keep_alive", {"keep_alive": 0}),
    ("/api/generate", "think", {"think": True, "raw": True}),
]  # fmt: skip
PROMISES = [
    ("/v1/chat/completions", "tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
    ("/v1/chat/completions", "tools[0].type", {"tools": [{"type": "funktion", "function": {"name": "f"}}]}),
    ("/v1/chat/completions", "modalities", {"modalities": ["text", "audio"]}),
    ("/v1/chat/completions", "functions", {"functions": [{"name": "f"}]}),
    ("/v1/completions", "suffix", {"suffix": "x"}),
    ("/v1/completions", "prompt_logprobs", {"prompt_logprobs": 0}),
    ("/v1/responses", "tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}),
    ("/v1/responses", "tools[0].type", {"tools": [{"type": "funktion", "name": "f", "parameters": {}}]}),
    ("/v1/responses", "include", {"include": ["message.output_text.logprobs"]}),
    ("/v1/responses", "top_logprobs", {"top_logprobs": 3}),
    ("/v1/responses", "background", {"background": True}),
    ("/v1/messages", "tool_choice", {
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "tool", "name": "web_search"},
    }),
    ("/v1/messages", "output_format", {"output_format": {"type": "json_schema"}}),
    ("/api/chat", "logprobs", {"logprobs": True}),
    ("/api/generate", "suffix", {"suffix": "x"}),
    ("/api/generate", "images", {"images": ["aa"]}),
    ("/api/generate", "system", {"system": "x", "raw": True}),
]  # fmt: skip


@pytest.fixture
def http(server):  # noqa: F811
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def strict(make_backend, run_server):
    with (
        run_server(make_backend(), strict=True) as running,
        httpx.Client(base_url=running.url, timeout=20) as client,
    ):
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "names", "given"), WISHES)
def test_a_wish_is_passed_over_by_name(http, path, names, given, stream):
    said = http.post(path, json={**BODIES[path], "stream": stream, **given})
    assert said.status_code == 200, said.text
    assert set(said.headers[HEADER].split(", ")) == set(names.split(", "))
    assert "x-evil" not in said.headers


@pytest.mark.parametrize(
    ("path", "names", "body"),
    [
        ("/v1/messages/count_tokens", "mcp_servers", {"messages": USER, "mcp_servers": [{"type": "url"}]}),
        ("/tokenize", "verbosity", {"messages": USER, "verbosity": "low"}),
        ("/api/chat", "keep_alive", {"messages": [], "keep_alive": "5m"}),
        ("/api/generate", "keep_alive", {"keep_alive": 0}),
    ],
)
def test_answers_that_need_no_engine_name_them_too(http, path, names, body):
    said = http.post(path, json=body)
    assert (said.status_code, said.headers[HEADER]) == (200, names), said.text


@pytest.mark.parametrize("how", ["events", "answer"])
def test_an_answer_that_is_read_again_names_them_again(http, how):
    said = http.post(
        "/v1/chat/completions",
        json={**BODIES["/v1/chat/completions"], "store": True, "resume": 60},
    )
    assert said.headers[HEADER] == "store"
    again = http.get(f"/v1/requests/{said.json()['id']}/{how}")
    assert (again.status_code, again.headers[HEADER]) == (200, "store")


@pytest.mark.slow
@pytest.mark.parametrize(("path", "names", "given"), WISHES)
def test_a_strict_server_refuses_a_wish(strict, path, names, given):
    said = strict.post(path, json={**BODIES[path], **given})
    assert said.status_code == 400 and "is not supported" in said.text
    assert any(said.text.count(name) for name in names.split(", "))


def test_a_strict_server_does_the_rest(strict):
    for path, body in BODIES.items():
        said = strict.post(path, json=body)
        assert said.status_code == 200 and HEADER not in said.headers


@pytest.mark.parametrize(("path", "name", "given"), PROMISES)
def test_a_promise_is_refused_by_name(http, server, path, name, given):  # noqa: F811
    said = http.post(path, json={**BODIES[path], **given})
    assert said.status_code == 400, said.text
    error = said.json()["error"]
    assert (error if isinstance(error, str) else error["message"]).startswith(name), error
    assert server.backend.requests == []


@pytest.mark.slow
def test_every_field_that_is_known_anywhere_is_one_of_both(http):
    """By the declaration itself: a wish is named, a promise refused, and what asks for nothing is neither."""
    for path in OPENAI:
        for name, known in unsupported.ANYWHERE.items():
            said = http.post(path, json={**BODIES[path], name: 77})
            assert said.status_code == (200 if known.wish else 400), (path, name, said.text)
            assert said.headers.get(HEADER) == (name if known.wish else None)
            for nothing in (None, *known.neutral):
                said = http.post(path, json={**BODIES[path], name: nothing})
                assert said.status_code == 200 and HEADER not in said.headers, (path, name, nothing)


# What is empty but of another type than the field's passes in no API in silence; of its own type it asks for nothing.
EMPTY = [
    ("prompt_logprobs", [], {}, "", False),
    ("truncate_prompt_tokens", [], {}, "", False),
    ("n_predict", {}, False),
    ("structural_tag", {}, [], False),
    ("return_token_ids", [], {}, ""),
    ("allowed_token_ids", {}, "", False),
    ("vllm_xargs", [], "", False),
    ("mm_processor_kwargs", [], "", False),
    ("repeat_penalty", [], {}, "", False),
]
OWN_EMPTY = {"structural_tag": "", "return_token_ids": False, "allowed_token_ids": [], "vllm_xargs": {}}


@pytest.mark.parametrize(("name", "empties"), [(name, empties) for name, *empties in EMPTY])
def test_what_is_empty_of_another_type_does_not_pass_in_silence(http, name, empties):
    wish = unsupported.ANYWHERE[name].wish
    for path in OPENAI:
        for value in empties:
            said = http.post(path, json={**BODIES[path], name: value})
            assert said.status_code == (200 if wish else 400), (path, value, said.text)
            assert said.headers.get(HEADER) == (name if wish else None)
            assert wish or said.json()["error"]["message"].startswith(f"{name}: "), said.text
        if name in OWN_EMPTY:
            said = http.post(path, json={**BODIES[path], name: OWN_EMPTY[name]})
            assert said.status_code == 200 and HEADER not in said.headers, (path, said.text)


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [("audio", {}, []), ("documents", [], {}), ("functions", [], ""), ("chat_template", "", [])],
)
def test_what_is_empty_in_a_chat_is_of_its_own_type(http, name, own, other):
    path = "/v1/chat/completions"
    assert http.post(path, json={**BODIES[path], name: own}).status_code == 200
    said = http.post(path, json={**BODIES[path], name: other})
    assert (said.status_code, said.json()["error"]["param"]) == (400, name), said.text


def test_a_tool_beside_a_hosted_one_keeps_its_place_in_a_refusal(http, server):  # noqa: F811
    hosted = {"type": "web_search"}
    flat = {"type": "function", **TOOLS[0]["function"]}
    said = http.post(
        "/v1/responses", json={"input": "x", "tools": [hosted, flat, {"type": "function", "name": "n o"}]}
    )
    assert said.json()["error"]["param"] == "tools[2].name"
    typed = {"type": "web_search_20250305", "name": "web_search"}
    body = {**BODIES["/v1/messages"], "tools": [typed, {"name": "f", "input_schema": 5}]}
    assert http.post("/v1/messages", json=body).json()["error"]["message"].startswith("tools[1].input_schema")
    kept = http.post(
        "/v1/chat/completions", json={**BODIES["/v1/chat/completions"], "tools": [hosted, *TOOLS]}
    )
    assert kept.headers[HEADER] == "tools.web_search"
    prompt = server.backend.tokenizer.decode(
        list(server.backend.requests[-1].prompt_ids), skip_special_tokens=False
    )
    assert "web_search" not in prompt and "forecast" in prompt


def test_names_are_plain_and_few():
    assert told_names(
        ["thinking.budget_tokens", "thinking", "tools[1].x", "a\r\nb: c", "é", "", "x" * 200]
    ) == ("thinking, tools[1].x")
    many = told_names([f"tools.t{i}" for i in range(100)])
    assert many.count(",") == MOST_NAMES and many.endswith("68 more")


def test_each_is_logged_once(caplog):
    ignored = Ignored()
    with caplog.at_level(logging.WARNING, "afserve.server"):
        for at in range(5):
            ignored.naming(lambda message: None, (f"tools[{at}].defer_loading", "thinking"))
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "passed over: tools.defer_loading, thinking"
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(values=st.dictionaries(st.sampled_from(sorted(unsupported.ANYWHERE)), JSON))
@settings(max_examples=300, deadline=None)
def test_any_value_of_a_wish_is_passed_over_and_never_refused(values):
    """Whatever its type: only a promise that asks for something refuses, and by its own name."""
    fields = Fields(values)
    promises = [name for name in values if not unsupported.ANYWHERE[name].wish]
    try:
        unsupported.refuse_known(fields, unsupported.ANYWHERE)
    except RequestError as error:
        assert error.param in promises
    else:
        for name in promises:
            value, known = values[name], unsupported.ANYWHERE[name]
            empty = value is False or value in ("", [], {})
            own = value is None or (empty and isinstance(value, known.kind))
            assert own or value in known.neutral, name
    assert set(fields.passed) <= set(values) - set(promises)


@pytest.mark.slow
@given(
    tool=st.dictionaries(
        st.sampled_from(["type", "name", "function", "parameters", "input_schema", "x"]), JSON
    )
)
@settings(max_examples=300, deadline=None)
def test_a_tool_is_hosted_or_the_clients_own(tool):
    """What has a function, or a name with a schema, is never passed over; what is has a header's name."""
    fields = Fields(tool, "tools[0]")
    hosted = unsupported.passes_hosted(fields)
    own = tool.get("function") is not None or (
        tool.get("name") is not None and (tool.get("parameters") or tool.get("input_schema")) is not None
    )
    assert not (hosted and own) and hosted == bool(fields.passed)
    assert not hosted or told_names(tuple(fields.passed)) == next(iter(fields.passed))
