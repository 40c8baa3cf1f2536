"""POST /v1/messages, Anthropic's API, as a chat request: content blocks to text, calls and results."""

import json
from collections.abc import Mapping
from functools import partial

from afserve.errors import RequestError, shown
from afserve.server.bodies.declared import MAX_TOKENS, SchedulingFields
from afserve.server.bodies.fields import Fields, or_else
from afserve.server.bodies.messages import not_read, picture_part, text_part
from afserve.server.bodies.prepared import ContextLengthError
from afserve.server.bodies.tools import TOLD_BY_RESULT
from afserve.server.bodies.unsupported import (
    OF_MESSAGES,
    OF_TOOLS,
    passes_hosted,
    refuse_known,
    refuse_unsupported,
)
from afserve.server.surfaces.cache_control import retention_of
from afserve.server.surfaces.translate import SAMPLING, Body, Translated, append_words

NAMES: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tool_choice.function": "tool_choice",
}
_HOSTED_CALLS = ("server_tool_use", "mcp_tool_use")
_OF_DEFERRED = {name: known for name, known in OF_TOOLS.items() if name != "defer_loading"}
_text = partial(text_part, kinds=("text",))
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def translate(fields: Fields) -> Translated:
    """Raises RequestError that names the field."""
    refuse_known(fields, OF_MESSAGES)
    refuse_unsupported(fields)
    if fields.get("max_tokens") is None:
        fields.refuse_field("max_tokens", "an integer")
    system, deferred = _words(fields, "system"), _Deferred(fields)
    messages: list[Body] = [{"role": "system", "content": system}] if system else []
    names: dict[str, str] = {}
    for message in fields.sections("messages"):
        if message.get("role") == "system":
            said = _words(message, "content")
            _remind(said or message.refuse_field("content", "a text or blocks of text"), messages)
            continue
        made = _message(message, deferred)
        names |= {f"messages[{len(messages) + i}]": message.path for i in range(len(made))}
        messages += made
    sampling = [name for name in SAMPLING if name not in ("service_tier", "stop")]
    chat: Body = {**fields.given(*sampling), "messages": messages}
    if seconds := retention_of(fields):
        chat["retain"] = max(seconds, SchedulingFields(fields).retain or 0.0)
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        chat["continue_final_message"] = True
    chat["max_completion_tokens"] = fields.get("max_tokens")
    if fields.get("stop_sequences") is not None:
        chat["stop"] = fields.get("stop_sequences")
    names |= _tools(fields, chat, deferred)
    thinking = fields.section("thinking")
    if thinking is not None:
        _thinking(thinking, chat)
    output = fields.section("output_config")
    if output is not None:
        names |= _output(output, chat)
    thinks = thinking is not None and "reasoning_effort" in names
    return Translated(chat, {}, names=names, also={"reasoning_effort": "thinking"} if thinks else {})


def translate_count(fields: Fields) -> Translated:
    """The same without an answer: one token of it is asked for, and none is made."""
    return translate(Fields({**fields.raw(), "max_tokens": 1}, passed=fields.passed))


def count(tokens: int) -> bytes:
    """The body of an answer of count_tokens."""
    return json.dumps({"input_tokens": tokens}).encode()


def length_words(error: ContextLengthError, context: int) -> ContextLengthError:
    """The refusal in the words that Anthropic's clients read numbers from, to send less or ask for fewer."""
    if error.wanted is None:
        return ContextLengthError(
            f"prompt is too long: {error.tokens} tokens > {context} maximum", param=error.param
        )
    return ContextLengthError(
        f"input length and `max_tokens` exceed context limit: {error.tokens} + {error.wanted} > {context}, decrease "
        "input length or `max_tokens` and try again",
        param=error.param,
    )


def _thinking(thinking: Fields, chat: Body) -> None:
    kind = thinking.text("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise RequestError.about("thinking.type", f"{shown(kind)} is none of enabled, disabled")
    chat["reasoning_effort"] = "none" if kind == "disabled" else "medium"
    if kind == "enabled":
        chat["thinking_token_budget"] = thinking.integer("budget_tokens", 0, MAX_TOKENS)
    display = or_else(thinking.text("display"), "summarized")
    if display not in ("summarized", "omitted"):
        raise thinking.refusal("display", f"{shown(display)} is neither summarized nor omitted")
    chat["include_reasoning"] = display == "summarized"


def _output(output: Fields, chat: Body) -> Mapping[str, str]:
    """What chat fields are called then. An effort counts where thinking is not off."""
    effort, names = output.text("effort"), {}
    if effort is not None and chat.get("reasoning_effort") != "none":
        chat["reasoning_effort"], names = effort, {"reasoning_effort": output.path_of("effort")}
    form = output.section("format")
    if form is None:
        return names
    if form.text("type") != "json_schema":
        raise form.refusal("type", f"{shown(form.get('type'))} is not json_schema")
    chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return names


def _remind(said: str, messages: list[Body]) -> None:
    """Instructions between messages. Many templates know none there, so that they come as agents told them before they
    had such messages: in the user's turn, in tags."""
    role = "system" if [message["role"] for message in messages[:2]] in ([], ["system"]) else "user"
    if role == "user":
        said = f"<system-reminder>\n{said}\n</system-reminder>"
    if messages and messages[-1]["role"] == role:
        append_words(messages[-1], said)
    else:
        messages.append({"role": role, "content": said})


def _words(fields: Fields, name: str) -> str | None:
    if isinstance(fields.get(name), list):
        return "\n".join(map(_text, fields.sections(name)))
    return fields.text(name)


class _Deferred:
    """Tools with `defer_loading`: a client's own search brings their definitions, in a result, so that a prompt's
    beginning stays. Nobody searches for what a hosted search would have to find: those are shown from the start."""

    def __init__(self, fields: Fields) -> None:
        tools = list(fields.sections("tools"))
        self._tools, self._told = {str(tool.get("name")): tool for tool in tools}, set[str]()
        self._searched = any(str(tool.get("type")).startswith("tool_search_tool") for tool in tools)
        if tools and not self._searched and all(tool.flag("defer_loading") for tool in tools):
            raise RequestError.about("tools", "all have defer_loading, so none is found; leave it out of one")

    def words(self, part: Fields) -> str:
        """Of a result's part. Raises RequestError where it is neither text nor names one of the tools."""
        if part.text("type") != "tool_reference":
            return _text(part)
        name = part.text("tool_name") or ""
        if name not in self._tools:
            raise part.refusal("tool_name", f"{shown(name)} is none of the tools; send its definition")
        self._told.add(name)
        told = json.dumps(_function(self._tools[name]), ensure_ascii=False)
        return f"<functions>\n<function>{told}</function>\n</functions>\n"

    def tool(self, tool: Fields) -> Body | None:
        """As a chat has it; None for one that no result has told of."""
        deferred = tool.flag("defer_loading") and not self._searched
        refuse_known(tool, _OF_DEFERRED if deferred else OF_TOOLS)
        if deferred and tool.get("name") not in self._told:
            return None
        made: Body = {"type": "function", "function": {**_function(tool), **tool.given("strict")}}
        return {**made, TOLD_BY_RESULT: True} if deferred else made


def _function(tool: Fields) -> Mapping[str, object]:
    parameters = or_else(tool.get("input_schema"), {})
    return {"name": tool.get("name"), "parameters": parameters, **tool.given("description")}


def _message(message: Fields, deferred: _Deferred) -> list[Body]:
    """One message, or several: results of tools are messages of their own."""
    role, content = message.text("role"), message.get("content")
    if role not in ("user", "assistant", "developer"):
        raise message.refusal("role", f"{shown(role)} is none of user, assistant and system")
    if not isinstance(content, list):
        return [{"role": role, "content": message.text("content")}]
    found: list[Body] = []
    parts, thoughts, calls = list[Mapping[str, object]](), list[str](), list[Body]()
    for block in message.sections("content"):
        kind = block.text("type")
        if kind == "text":
            parts.append({"type": "text", "text": _text(block)})
        elif kind == "image":
            parts.append(picture_part(_url(block)))
        elif kind == "tool_use":
            arguments = or_else(block.get("input"), {})
            function = {"name": block.text("name"), "arguments": arguments}
            calls.append({"id": block.text("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            said = _result(block, deferred)
            found.append({"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": said})
        elif kind == "thinking":
            thoughts.append(or_else(block.text("thinking"), ""))
        elif kind in _HOSTED_CALLS or (kind or "").endswith("_tool_result"):
            block.pass_over(
                f"messages.{kind}", "tools that Anthropic runs are not served; leave its blocks out"
            )
        elif kind != "redacted_thinking":
            raise block.refusal("type", not_read(kind))
    if parts or calls or not found:
        texts = [str(part["text"]) for part in parts if "text" in part]
        whole: Body = {"role": role, "content": "".join(texts) if len(texts) == len(parts) else parts}
        if "".join(thoughts):
            whole["reasoning_content"] = "".join(thoughts)
        found.append({**whole, "tool_calls": calls} if calls else whole)
    return found


def _url(block: Fields) -> object:
    """Of a picture; None where it has no source."""
    source = block.section("source")
    if source is None or source.get("type") == "url":
        return None if source is None else source.get("url")
    return f"data:{source.text('media_type')};base64,{source.text('data')}"


def _result(block: Fields, deferred: _Deferred) -> str:
    """What a tool gave back; that it failed is said in words, since templates have no place for it."""
    several = isinstance(block.get("content"), list)
    parts = map(deferred.words, block.sections("content")) if several else [block.text("content") or ""]
    said = "".join(parts)
    return f"Error: {said}" if block.flag("is_error") else said


def _tools(fields: Fields, chat: Body, deferred: _Deferred) -> Mapping[str, str]:
    """What the chat's tools are called here: those that Anthropic runs itself are not among them."""
    tools: list[Body] = []
    names: dict[str, str] = {}
    for tool in fields.sections("tools"):
        if passes_hosted(tool):
            continue
        if tool.get("type") not in (None, "custom"):
            raise tool.refusal("type", f"{shown(tool.get('type'))} is not served here, only your own tools")
        function = deferred.tool(tool)
        if function is None:
            continue
        own = f"tools[{len(tools)}]"
        names |= {f"{own}.function.parameters": tool.path_of("input_schema"), f"{own}.function": tool.path}
        tools.append(function)
    if tools:
        chat["tools"] = tools
    _choice(fields, chat)
    return names


def _choice(fields: Fields, chat: Body) -> None:
    choice = fields.section("tool_choice")
    if choice is None:
        return
    kind = choice.text("type")
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        raise RequestError.about("tool_choice.type", f"{shown(kind)} is none of auto, any, tool, none")
    if choice.flag("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
