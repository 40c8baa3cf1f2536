"""Prompts of chats: the last message gone on with as transformers does it, roles, and calls that were cut."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from afserve.errors import RequestError
from afserve.server.bodies.fields import Fields
from afserve.server.bodies.messages import messages_of, object_of
from afserve.server.text.conversation import Roles
from afserve.tokens.chat_template import ChatTemplate
from tests.server.test_https import wait_until

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
KEPT = {
    "chatml": CHATML,
    "trimmed": CHATML.replace("m.content", "m.content | trim"),
    "trimmed behind a space": "{% for m in messages %}[{{ m.role }}] {{ m.content.strip() }} </s>{% endfor %}",
    "at the left": "{% for m in messages %}<{{ m.role }}>{{ m.content.lstrip('\n') }}</s>{% endfor %}",
    "reasoning": (
        "{% for m in messages %}{% set words = m.content %}{% if '</think>' in words %}"
        "{% set thought = words.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "{% set words = '<think>\n' + thought + '\n</think>\n\n' + words.split('</think>')[-1].lstrip('\n') %}"
        "{% endif %}{{ '<|im_start|>' + m.role + '\n' + words + '<|im_end|>\n' }}{% endfor %}"
    ),
}
PIECES = (
    *(
        "<",
        ">",
        "i",
        "end",
        "|",
        "d",
        "\n",
        " ",
        "    ",
        "\t",
        "<|im_end|>",
        "</s>",
        "assistant",
        "def f():",
        "é",
    ),
    *("<think>", "</think>", "</think>\n\n", "{{ 1 }}", "日本", "\u00a0", "\u200b", "CONTINUED_", "'"),
)
WORDS = st.lists(
    st.sampled_from(PIECES) | st.text(max_size=4),
    max_size=6,
).map("".join)


def continued(template: str, messages: list[dict[str, object]]) -> str | None:
    """None: refused."""
    try:
        return ChatTemplate(template, {}).render(
            messages, add_generation_prompt=False, continue_final_message=True
        )
    except RequestError:
        return None


def of_transformers(template: str, messages: list[dict[str, object]]) -> str | None:
    try:
        return render_jinja_template([messages], chat_template=template, continue_final_message=True)[0][0]
    except ValueError:
        return None


@pytest.mark.parametrize("name", KEPT)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(before=WORDS, last=WORDS)
@example(before="hi", last="")
@example(before="hi", last="<")
@example(before="hi", last=">\n")
@example(before="hi", last="def f():\n    ")
@example(before="the same", last="the same")
def test_goes_on_as_transformers(name, before, last):
    messages = [{"role": "user", "content": before}, {"role": "assistant", "content": last}]
    expected = of_transformers(KEPT[name], messages)
    if expected is not None and not expected.rstrip().endswith(last.strip()):
        expected = None  # changed, and transformers found the words elsewhere
    assert continued(KEPT[name], messages) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{{ messages[-1].content }}{{ messages[-1].content }}",
        "{{ messages[-1].content[:20] }}",
        "{{ messages[-1].content | lower }}",
        "{{ messages[-1].content.replace('X', 'y') }}",
        "{{ messages[-1].content | reverse }}",
    ],
)
def test_a_template_that_changes_the_words_is_refused(template):
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "aXb"}]
    with pytest.raises(RequestError, match="leaves the last message out, changes it or repeats it"):
        ChatTemplate(template, {}).render(messages, add_generation_prompt=False, continue_final_message=True)


def test_a_message_without_text_has_nothing_to_go_on_with():
    with pytest.raises(RequestError) as caught:
        ChatTemplate(CHATML, {}).render(
            [{"role": "user", "content": "u"}, {"role": "assistant", "content": None}],
            continue_final_message=True,
        )
    assert caught.value.param == "messages[1].content"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_by_any_name_is_shown_as_transformers_does(name):
    template = (
        "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.thinking }}]{{ m.content }}{% endfor %}"
    )
    sent = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", name: "hm"}]
    told = messages_of(Fields({"messages": sent}))
    expected = render_jinja_template([sent], chat_template=template)[0][0]
    assert ChatTemplate(template, {}).render(told) == expected


# ---- roles

NAMED = "{% for m in messages %}{% if m['role'] in ['developer', 'ipython'] %}{{ m.content }}{% endif %}{% endfor %}"


def roles_of(template: str, *roles: str) -> list[str]:
    shown = Roles(ChatTemplate(template, {})).shown([{"role": role, "content": "x"} for role in roles])
    return [str(message["role"]) for message in shown]


def test_developer_is_system_where_the_template_does_not_name_it():
    assert roles_of(CHATML, "developer", "user", "developer") == ["system", "user", "system"]
    assert roles_of(NAMED, "developer", "user") == ["developer", "user"]


@pytest.mark.parametrize(
    "template",
    [
        "{# developer is not known #}" + CHATML,
        "<|developer|>" + CHATML,
        "{% if messages[0].role == 'x' %}{{ raise_exception('the developer role') }}{% endif %}" + CHATML,
    ],
)
def test_developer_in_other_words_is_no_role(template):
    assert roles_of(template, "developer") == ["system"]


@pytest.mark.parametrize(
    "role", ["", " ", "System", "function", "model", "content", "a" * 10_000, "user\n", "\ud800"]
)
def test_an_unknown_role_is_refused(role):
    with pytest.raises(RequestError) as caught:
        roles_of(CHATML, "user", role)
    assert caught.value.param == "messages[1].role" and len(caught.value.message) < 300


@pytest.mark.parametrize(
    "compared",
    ["m.role == 'ipython'", "m['role'] in ('a', 'ipython')", "'ipython' == role", "not role != 'ipython'"],
)
def test_a_role_that_the_template_names_is_known(compared):
    template = (
        "{% for m in messages %}{% set role = m.role %}{% if " + compared + " %}x{% endif %}{% endfor %}"
    )
    assert roles_of(template, "ipython") == ["ipython"]


# ---- calls that were cut

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def within(part: object, whole: object) -> bool:
    """Whether `part` is what a beginning of `whole` may hold."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and within(value, whole[key]) for key, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(within, part, whole))
    if isinstance(part, str) and isinstance(whole, str):
        return whole.startswith(part)
    if isinstance(part, int | float) and isinstance(whole, int | float):
        return True  # cut digits are a number too
    return part == whole


@settings(max_examples=200, deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=4), VALUES, max_size=4), ascii_=st.booleans(), data=st.data()
)
def test_a_cut_object_holds_what_was_said(arguments, ascii_, data):
    text = json.dumps(arguments, ensure_ascii=ascii_)
    cut = data.draw(st.integers(1, len(text)))
    found = object_of(text[:cut])
    assert within(found, arguments)
    assert cut < len(text) or found == arguments


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("null", {}),
        ('{"a": "b', {"a": "b"}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": "x\\u12', {"a": "x"}),
        ('{"a": "\\ud83d', {"a": ""}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b": tr', {"a": 1}),
        ('{"a": [{"b": "c"', {"a": [{"b": "c"}]}),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}),
        ("a.py", {"arguments": "a.py"}),
        ("[1]", {"arguments": [1]}),
        ('{"a": 1} and more', {"arguments": '{"a": 1} and more'}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
        ('{"a":' + "[" * 100_000, {"arguments": '{"a":' + "[" * 100_000}),
    ],
)
def test_any_text_is_an_object(text, found):
    assert object_of(text) == found


@pytest.mark.parametrize("arguments", [5, ["x"], True, 1.5])
def test_arguments_that_are_no_text_are_refused(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RequestError) as caught:
        messages_of(Fields({"messages": [{"role": "assistant", "tool_calls": [call]}]}))
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


# ---- the same on every surface

USER = {"role": "user", "content": "hi"}


def prompt_of(server, http, path: str, body: dict[str, object]) -> str:
    if path == "/tokenize":
        ids = http.post(path, json=body).raise_for_status().json()["tokens"]
    else:
        http.post(path, json={"model": "tiny", **body}).raise_for_status()
        ids = server.backend.requests[-1].prompt_ids
    return server.backend.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "field", "more"),
    [
        ("/v1/chat/completions", "messages", {}),
        ("/tokenize", "messages", {}),
        ("/v1/responses", "input", {}),
        ("/api/chat", "messages", {"stream": False}),
    ],
)
def test_roles_on_every_surface(server, http, path, field, more):
    told = [
        prompt_of(server, http, path, {field: [{"role": role, "content": "be brief"}, USER], **more})
        for role in ("system", "developer")
    ]
    assert told[0] == told[1] == "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"
    reply = http.post(path, json={"model": "tiny", field: [USER, {"role": "wizard", "content": "x"}], **more})
    assert reply.status_code == 400 and f"{field}[1].role: 'wizard'" in reply.text


def test_developer_among_the_messages_of_anthropic(server, http):
    told = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, USER]
    prompt = prompt_of(server, http, "/v1/messages", {"messages": told, "max_tokens": 4})
    assert prompt == "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"


def test_a_batch_line_has_the_same_roles(server, http):
    body = {"model": "tiny", "messages": [{"role": "developer", "content": "be brief"}, USER]}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body})
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", line)}).json()
    batch = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    made = http.post("/v1/batches", json=batch).raise_for_status().json()
    wait_until(lambda: http.get(f"/v1/batches/{made['id']}").json()["status"] == "completed")
    ids = server.backend.requests[-1].prompt_ids
    assert server.backend.tokenizer.decode(ids, skip_special_tokens=False).startswith(
        "<|system|>be brief<|end|>"
    )


@pytest.mark.parametrize(
    "content",
    [
        "The answer",
        "",
        "def f():\n    ",
        [{"type": "text", "text": "The "}, {"type": "text", "text": "answer"}],
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_the_last_message_of_the_assistant_is_gone_on_with(server, http, path, content):
    body = {"model": "tiny", "max_tokens": 4, "messages": [USER, {"role": "assistant", "content": content}]}
    words = content if isinstance(content, str) else "The answer"
    expected = f"<|user|>hi<|end|><|assistant|>{words}"
    if path.endswith("count_tokens"):
        counted = http.post(path, json=body).json()["input_tokens"]
        assert counted == len(server.backend.tokenizer.encode(expected))
    else:
        assert prompt_of(server, http, path, body) == expected


def test_a_call_of_the_assistant_is_not_gone_on_with(server, http):
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    body = {"max_tokens": 4, "messages": [USER, {"role": "assistant", "content": [call]}]}
    assert prompt_of(server, http, "/v1/messages", body).endswith("<|assistant|>")


@pytest.mark.parametrize("arguments", ['{"path": "a.py", "content": "def f(', "", "not JSON", "[1, 2", "5"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/responses"])
def test_a_call_that_was_cut_can_be_sent_back(http, path, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
    items = [USER, {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}, USER]
    body = {"input": items} if path == "/v1/responses" else {"messages": messages}
    assert http.post(path, json={"model": "tiny", **body}).status_code == 200
