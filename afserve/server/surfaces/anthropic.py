"""POST /v1/messages, Anthropic's API, as a chat request: content blocks to text, calls and results."""

from collections.abc import Mapping

from afserve.errors import RequestError, shown
from afserve.server.fields import Fields, or_else
from afserve.server.surfaces.translate import SAMPLING, Body, Translated, copied
from afserve.server.unsupported import refuse_unsupported

NAMES: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REFUSED = ("mcp_servers", "container", "context_management", "output_format", "output_config")


def translate(fields: Fields) -> Translated:
    """Raises RequestError that names the field."""
    for name in _REFUSED:
        if fields.get(name):
            raise RequestError(f"{name}: is not supported; leave it out", param=name)
    refuse_unsupported(fields)
    if fields.get("max_tokens") is None:
        fields.refuse("max_tokens", "an integer")
    messages = _system(fields)
    for message in fields.sections("messages"):
        messages += _message(message)
    sampling = [name for name in SAMPLING if name not in ("service_tier", "stop")]
    chat: Body = {**copied(fields, sampling), "messages": messages}
    chat["max_completion_tokens"] = fields.get("max_tokens")
    if fields.get("stop_sequences") is not None:
        chat["stop"] = fields.get("stop_sequences")
    _tools(fields, chat)
    thinking = fields.section("thinking")
    if thinking is not None:
        _thinking(thinking, chat)
    return Translated(chat, {"stops": list(fields.texts("stop_sequences", 16))})


def translate_count(fields: Fields) -> Translated:
    """The same without an answer: one token of it is asked for, and none is made."""
    return translate(Fields({**fields.raw(), "max_tokens": 1}))


def _thinking(thinking: Fields, chat: Body) -> None:
    kind = thinking.text("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise RequestError(
            f"thinking.type: {shown(kind)} is none of enabled, disabled", param="thinking.type"
        )
    if kind == "disabled":
        chat["include_reasoning"] = False
    else:
        chat["reasoning_effort"] = "medium"


def _system(fields: Fields) -> list[Body]:
    value = fields.get("system")
    if isinstance(value, list):
        value = "\n".join(_text(block) for block in fields.sections("system"))
    elif value is not None:
        value = fields.text("system")
    return [{"role": "system", "content": value}] if value else []


def _message(message: Fields) -> list[Body]:
    """One message, or several: results of tools are messages of their own."""
    role, content = message.text("role"), message.get("content")
    if role not in ("user", "assistant"):
        name = message.name("role")
        raise RequestError(f"{name}: {shown(role)} is neither user nor assistant", param=name)
    if not isinstance(content, list):
        return [{"role": role, "content": message.text("content")}]
    found: list[Body] = []
    texts: list[str] = []
    calls: list[Body] = []
    for block in message.sections("content"):
        kind = block.text("type")
        if kind == "text":
            texts.append(_text(block))
        elif kind == "tool_use":
            arguments = or_else(block.get("input"), {})
            function = {"name": block.text("name"), "arguments": arguments}
            calls.append({"id": block.text("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            found.append(
                {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": _result(block)}
            )
        elif kind not in ("thinking", "redacted_thinking"):
            name = block.name("type")
            raise RequestError(f"{name}: {shown(kind)} is not served, this model reads text only", param=name)
    if texts or calls or not found:
        whole: Body = {"role": role, "content": "".join(texts)}
        found.append({**whole, "tool_calls": calls} if calls else whole)
    return found


def _text(block: Fields) -> str:
    text = block.text("text") if block.text("type") == "text" else None
    if text is None:
        block.refuse("text", "the text of a block of type text")
    return text


def _result(block: Fields) -> str:
    content = block.get("content")
    if isinstance(content, list):
        return "".join(_text(part) for part in block.sections("content"))
    return or_else(block.text("content"), "")


def _tools(fields: Fields, chat: Body) -> None:
    tools = []
    for tool in fields.sections("tools"):
        if tool.get("type") not in (None, "custom"):
            name = tool.name("type")
            raise RequestError(
                f"{name}: {shown(tool.get('type'))} is not served here, only your own tools", param=name
            )
        parameters = or_else(tool.get("input_schema"), {})
        function = {"name": tool.get("name"), "parameters": parameters}
        if tool.get("description") is not None:
            function["description"] = tool.get("description")
        tools.append({"type": "function", "function": function})
    if tools:
        chat["tools"] = tools
    choice = fields.section("tool_choice")
    if choice is None:
        return
    kind = choice.text("type")
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        raise RequestError(
            f"tool_choice.type: {shown(kind)} is none of auto, any, tool, none", param="tool_choice"
        )
    if choice.flag("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
