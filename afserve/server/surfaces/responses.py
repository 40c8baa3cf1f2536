"""POST /v1/responses as a chat request: input items to messages, flat tools to nested ones."""

import json
from collections.abc import Mapping, Sequence

from afserve.errors import RequestError
from afserve.server.bodies.fields import Fields, or_else
from afserve.server.bodies.messages import TEXT_PARTS, not_read, picture_part, text_part
from afserve.server.bodies.unsupported import (
    OF_REASONING,
    OF_RESPONSES,
    OF_TEXT,
    refuse_known,
    refuse_unsupported,
)
from afserve.server.surfaces.response_tools import flat_name, free_arguments, offered_tools, tool_choice
from afserve.server.surfaces.translate import SAMPLING, Body, Translated, append_words

NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning",
}
MAX_ITEMS = 8192
MAX_REPEATED = 1 << 18
# Items of tools that a server runs, not the client: the model does not see them.
_HOSTED = (
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call",
    "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call", "tool_search_output",
)  # fmt: skip
# Calls of tools that a client runs without having described them, and what each was asked to do.
_UNDESCRIBED = {"local_shell_call": "action", "apply_patch_call": "operation"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output", *(f"{kind}_output" for kind in _UNDESCRIBED))
_INSTRUCTING = ("system", "developer")
_LOGPROBS = "message.output_text.logprobs"
_TEXTS = (*TEXT_PARTS, "output_text")


def translate(fields: Fields, before: list[object]) -> Translated:
    """`before` are the items of the responses that this one follows. Raises RequestError that names the field."""
    _refuse(fields)
    own = _items(fields)
    instructions = fields.text("instructions")
    messages: list[Body] = [{"role": "system", "content": instructions}] if instructions else []
    _messages(before, "previous_response_id", messages, fields)
    names = _messages(own, "input", messages, fields)
    chat: Body = {**fields.given(*SAMPLING), "messages": messages}
    if fields.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = fields.get("max_output_tokens")
    names |= _tools(fields, chat)
    _format(fields, chat)
    reasoning = fields.section("reasoning")
    if reasoning is not None:
        refuse_known(reasoning, OF_REASONING)
        chat["reasoning_effort"] = reasoning.get("effort")
    kept = [*before, *own] if fields.flag("store", True) else ()
    return Translated(chat, _facts(fields), kept, names)


def _refuse(fields: Fields) -> None:
    refuse_unsupported(fields)
    refuse_known(fields, OF_RESPONSES)
    for each in fields.texts("include", 16):
        if each == _LOGPROBS:
            raise RequestError.about(
                "include", "logprobs are not supported here; chat completions and completions have them"
            )
        if each != "reasoning.encrypted_content":
            fields.pass_over("include", "this server has no tools of its own; leave it out")


def _facts(fields: Fields) -> Body:
    """What the answer repeats. Raises RequestError for more than fits into every event that repeats it."""
    facts = _repeated(fields)
    size = len(json.dumps(facts))
    if size > MAX_REPEATED:
        raise RequestError.about(
            "tools",
            f"with instructions and metadata they have {size} bytes, at most {MAX_REPEATED} are taken",
        )
    return facts


def _repeated(fields: Fields) -> Body:
    return {
        "instructions": fields.text("instructions"),
        "metadata": or_else(fields.get("metadata"), {}),
        "previous_response_id": fields.text("previous_response_id"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "tool_choice": or_else(fields.get("tool_choice"), "auto"),
        "tools": or_else(fields.get("tools"), []),
        "text": or_else(fields.get("text"), {"format": {"type": "text"}}),
        "reasoning": or_else(fields.get("reasoning"), {"effort": None, "summary": None}),
        "temperature": fields.get("temperature"),
        "top_p": fields.get("top_p"),
        "top_logprobs": 0,
        "truncation": or_else(fields.text("truncation"), "disabled"),
        "store": fields.flag("store", True),
        "service_tier": or_else(fields.text("service_tier"), "default"),
        "user": fields.text("user"),
    }


def _items(fields: Fields) -> list[object]:
    value = fields.get("input")
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    fields.entries("input", MAX_ITEMS)
    items: list[object] = [dict(item.raw()) for item in fields.sections("input")]
    if not items:
        fields.refuse_field("input", "a string or an array of at least one item")
    return items


def _messages(items: Sequence[object], name: str, messages: list[Body], body: Fields) -> dict[str, str]:
    """Appends what `items` are as messages; `name` is the field they came in. Returns what parts of messages are
    called there. Reasoning becomes part of the message or call behind it; the template says whether it is shown."""
    names: dict[str, str] = {}
    thought = ""
    for at, item in enumerate(items):
        assert isinstance(item, dict), "items are objects"
        fields = Fields(item, f"{name}[{at}]", body.passed)
        kind = or_else(fields.text("type"), "message")
        if kind == "message":
            names[f"messages[{len(messages)}]"] = fields.path
            _say(_message(fields), messages)
        elif kind.endswith("_call") and (asked := _called(kind, fields)):
            _call(*asked, fields, messages, names)
        elif kind in _OUTPUTS:
            call_id, content = or_else(fields.get("call_id"), fields.get("id")), _content(fields, "output")
            names[f"messages[{len(messages)}].tool_call_id"] = fields.path_of("call_id")
            names[f"messages[{len(messages)}].content"] = fields.path_of("output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "reasoning":
            thought += "".join(or_else(part.text("text"), "") for part in fields.sections("content"))
            continue
        elif kind in _HOSTED:
            body.pass_over(f"input.{kind}", "tools that a server runs are not served; leave their items out")
            continue
        else:
            raise fields.refusal("type", not_read(kind))
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    return names


def _say(message: Body, messages: list[Body]) -> None:
    """Instructions that follow one another are one message: many templates know only the first."""
    if messages and message["role"] in _INSTRUCTING and messages[-1]["role"] in _INSTRUCTING:
        append_words(messages[-1], _text_of(message["content"]))
    else:
        messages.append(message)


def _text_of(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part["text"]) for part in content)
    return content if isinstance(content, str) else ""


def _message(fields: Fields) -> Body:
    role = fields.text("role")
    if not role:
        fields.refuse_field("role", "a string such as user, assistant or system")
    return {"role": role, "content": _content(fields, "content")}


def _content(fields: Fields, key: str) -> object:
    if not isinstance(fields.get(key), list):
        return fields.text(key)
    sees = fields.get("role") == "user"
    return [
        picture_part(part.get("image_url"))
        if sees and part.get("type") == "input_image"
        else {"type": "text", "text": text_part(part, _TEXTS)}
        for part in fields.sections(key)
    ]


def _called(kind: str, fields: Fields) -> tuple[str | None, object] | None:
    """The name and the arguments of a call that a client ran; None where the item is another one's."""
    if kind == "function_call":
        name = fields.text("name")
        return name and flat_name(name, fields.get("namespace")), fields.text("arguments")
    if kind == "custom_tool_call":
        name = fields.text("name")
        given = free_arguments(or_else(fields.text("input"), ""))
        return name and flat_name(name, fields.get("namespace")), given
    if kind in _UNDESCRIBED:
        return kind.removesuffix("_call"), json.dumps(or_else(fields.get(_UNDESCRIBED[kind]), {}))
    return None


def _call(
    name: str | None, arguments: object, fields: Fields, messages: list[Body], names: dict[str, str]
) -> None:
    """Calls that follow one another, or the words before them, are one message of the assistant."""
    function = {"name": name, "arguments": arguments}
    call = {
        "id": or_else(fields.text("call_id"), fields.text("id")),
        "type": "function",
        "function": function,
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    calls = messages[-1].setdefault("tool_calls", [])
    assert isinstance(calls, list), "made here"
    chat = f"messages[{len(messages) - 1}].tool_calls[{len(calls)}]"
    names |= {f"{chat}.id": fields.path_of("call_id"), f"{chat}.function": fields.path}
    calls.append(call)


def _tools(fields: Fields, chat: Body) -> dict[str, str]:
    """What the chat's tools are called here."""
    offered = offered_tools(fields)
    if offered:
        chat["tools"] = [{"type": "function", "function": each.function} for each in offered]
    if fields.get("tool_choice") is not None:
        chat["tool_choice"] = tool_choice(fields, offered)
    if fields.get("parallel_tool_calls") is not None:
        chat["parallel_tool_calls"] = fields.get("parallel_tool_calls")
    return {f"tools[{at}].function": each.path for at, each in enumerate(offered)}


def _format(fields: Fields, chat: Body) -> None:
    text = fields.section("text")
    if text is not None:
        refuse_known(text, OF_TEXT)
    form = None if text is None else text.section("format")
    if form is None:
        return
    kind = form.text("type")
    if kind == "json_schema":
        schema = {key: form.get(key) for key in ("name", "schema", "strict")}
        chat["response_format"] = {"type": kind, "json_schema": schema}
    else:
        chat["response_format"] = {"type": kind}
