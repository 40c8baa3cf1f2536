"""POST /v1/responses as a chat request: input items to messages, flat tools to nested ones."""

import json
from collections.abc import Mapping, Sequence

from afserve.errors import RequestError, shown
from afserve.server.fields import Fields, or_else
from afserve.server.surfaces.translate import Body, Translated, copied
from afserve.server.unsupported import VERBOSITY, KnownField, refuse_known, refuse_unsupported

NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tools[].function": "tools[]",
}
MAX_ITEMS = 8192
MAX_REPEATED = 1 << 18
_REFUSED = {
    "background": KnownField("ask for a stream, or send it with /v1/batches"),
    "conversation": KnownField("use previous_response_id"),
    "prompt": KnownField("send the text itself"),
    "max_tool_calls": KnownField("this server calls no tools itself"),
    "context_management": KnownField("leave it out"),
}
_NO_SUMMARY = KnownField("the reasoning itself is told; leave it out", ("auto",))
_OF_REASONING = {
    "summary": _NO_SUMMARY,
    "generate_summary": _NO_SUMMARY,
    "context": KnownField(
        "earlier reasoning is shown to the model as its template does it; leave it out", ("auto",)
    ),
    "mode": KnownField("use effort", ("standard",)),
}
_OF_TOOLS = {
    "defer_loading": KnownField("every tool is shown to the model; leave it out"),
    "allowed_callers": KnownField("only the model calls tools here; leave it out", (["direct"],)),
}
_TEXTS = ("input_text", "output_text", "text", "refusal")


def translate(fields: Fields, before: list[object]) -> Translated:
    """`before` are the items of the responses that this one follows. Raises RequestError that names the field."""
    _refuse(fields)
    own = _items(fields)
    instructions = fields.text("instructions")
    messages: list[Body] = [{"role": "system", "content": instructions}] if instructions else []
    _messages(before, "previous_response_id", messages)
    names = _messages(own, "input", messages)
    chat: Body = {**copied(fields), "messages": messages}
    if fields.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = fields.get("max_output_tokens")
    _tools(fields, chat)
    _format(fields, chat)
    reasoning = fields.section("reasoning")
    if reasoning is not None:
        refuse_known(reasoning, _OF_REASONING)
        chat["reasoning_effort"] = reasoning.get("effort")
    kept = [*before, *own] if fields.flag("store", True) else ()
    return Translated(chat, _facts(fields), kept, names)


def _refuse(fields: Fields) -> None:
    refuse_unsupported(fields)
    refuse_known(fields, _REFUSED)
    truncation = or_else(fields.text("truncation"), "disabled")
    if truncation != "disabled":
        raise RequestError(
            f"truncation: {shown(truncation)} is not supported, only disabled; send what fits",
            param="truncation",
        )
    odd = [each for each in fields.texts("include", 16) if each != "reasoning.encrypted_content"]
    if odd or fields.get("top_logprobs"):
        name = "include" if odd else "top_logprobs"
        raise RequestError(
            f"{name}: is not supported; chat completions and completions have logprobs", param=name
        )


def _facts(fields: Fields) -> Body:
    """What the answer repeats. Raises RequestError for more than fits into every event that repeats it."""
    facts = _repeated(fields)
    size = len(json.dumps(facts))
    if size > MAX_REPEATED:
        raise RequestError(
            f"tools: with instructions and metadata they have {size} bytes, at most {MAX_REPEATED} are taken",
            param="tools",
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
        "truncation": "disabled",
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
        fields.refuse("input", "a string or an array of at least one item")
    return items


def _messages(items: Sequence[object], name: str, messages: list[Body]) -> dict[str, str]:
    """Appends what `items` are as messages; `name` is the field they came in. Returns what parts of messages are
    called there. Reasoning becomes part of the message or call behind it; the template says whether it is shown."""
    names: dict[str, str] = {}
    thought = ""
    for at, item in enumerate(items):
        assert isinstance(item, dict), "items are objects"
        fields = Fields(item, f"{name}[{at}]")
        kind = or_else(fields.text("type"), "message")
        if kind == "message":
            names[f"messages[{len(messages)}]"] = fields.path
            messages.append(_message(fields))
        elif kind == "function_call":
            _call(fields, messages, names)
        elif kind == "function_call_output":
            call_id, content = fields.get("call_id"), _content(fields, "output")
            names[f"messages[{len(messages)}].tool_call_id"] = fields.name("call_id")
            names[f"messages[{len(messages)}].content"] = fields.name("output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "reasoning":
            thought += "".join(or_else(part.text("text"), "") for part in fields.sections("content"))
            continue
        else:
            own = fields.name("type")
            raise RequestError(f"{own}: {shown(kind)} is not served, this model reads text only", param=own)
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    return names


def _message(fields: Fields) -> Body:
    role = fields.text("role")
    if not role:
        fields.refuse("role", "a string such as user, assistant or system")
    return {"role": role, "content": _content(fields, "content")}


def _content(fields: Fields, key: str) -> object:
    """Text, or its parts."""
    if not isinstance(fields.get(key), list):
        return fields.text(key)
    parts = []
    for part in fields.sections(key):
        kind = part.text("type")
        if kind not in _TEXTS:
            name = part.name("type")
            raise RequestError(f"{name}: {shown(kind)} is not served, this model reads text only", param=name)
        text = part.text("refusal" if kind == "refusal" else "text")
        if text is None:
            part.refuse("text", "a string")
        parts.append({"type": "text", "text": text})
    return parts


def _call(fields: Fields, messages: list[Body], names: dict[str, str]) -> None:
    """Calls that follow one another, or the words before them, are one message of the assistant."""
    call = {
        "id": fields.text("call_id"),
        "type": "function",
        "function": {"name": fields.text("name"), "arguments": fields.text("arguments")},
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    calls = messages[-1].setdefault("tool_calls", [])
    assert isinstance(calls, list), "made here"
    chat = f"messages[{len(messages) - 1}].tool_calls[{len(calls)}]"
    names |= {f"{chat}.id": fields.name("call_id"), f"{chat}.function": fields.path}
    calls.append(call)


def _tools(fields: Fields, chat: Body) -> None:
    tools = []
    for tool in fields.sections("tools"):
        kind = tool.text("type")
        if kind != "function":
            name = tool.name("type")
            raise RequestError(f"{name}: {shown(kind)} is not served, only function tools are", param=name)
        refuse_known(tool, _OF_TOOLS)
        function = {
            key: tool.get(key)
            for key in ("name", "description", "parameters", "strict")
            if tool.get(key) is not None
        }
        tools.append({"type": "function", "function": function})
    if tools:
        chat["tools"] = tools
    for name in ("tool_choice", "parallel_tool_calls"):
        if fields.get(name) is not None:
            chat[name] = fields.get(name)


def _format(fields: Fields, chat: Body) -> None:
    text = fields.section("text")
    if text is not None:
        refuse_known(text, {"verbosity": VERBOSITY})
    form = None if text is None else text.section("format")
    if form is None:
        return
    kind = form.text("type")
    if kind == "json_schema":
        schema = {key: form.get(key) for key in ("name", "schema", "strict")}
        chat["response_format"] = {"type": kind, "json_schema": schema}
    else:
        chat["response_format"] = {"type": kind}
