"""The tools of a chat request: which are shown to the model, and what its answer must then be."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afserve.errors import RequestError, shown
from afserve.grammar import Tag
from afserve.server.fields import Fields
from afserve.server.reading.json_calls import HERMES
from afserve.server.reading.kinds import parameter_types
from afserve.server.unsupported import passes_hosted

MAX_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
_ANY: Mapping[str, object] = {"type": "object"}
# A function without parameters takes an empty object, as OpenAI has it.
_NONE: Mapping[str, object] = {**_ANY, "properties": {}, "additionalProperties": False}
Tool = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Tools:
    """`choice`: auto, none or required; `named` is the one function that is called, whatever the model thinks."""

    shown: tuple[Tool, ...] = ()
    choice: str = "none"
    named: str = ""
    parallel: bool = True

    @property
    def used(self) -> bool:
        return bool(self.shown) and self.choice != "none"

    def schema(self) -> Mapping[str, object] | None:
        """Of an answer that must be calls: a list of them, or the arguments of the named one. None: text."""
        functions = [_function(tool) for tool in self.shown]
        if self.named:
            return next(_parameters(f) for f in functions if f["name"] == self.named)
        if self.choice != "required":
            return None
        return _list_of(functions, most=None if self.parallel else 1)

    @property
    def strict(self) -> str:
        """The name of a function whose arguments must follow its schema wherever the model calls it; "" for none."""
        return next((str(f["name"]) for f in map(_function, self.shown) if f.get("strict") is True), "")

    def tags(self) -> tuple[Tag, ...]:
        """Calls in Hermes' form in running text; a function that is not strict takes any object."""
        functions = [_function(tool) for tool in self.shown]
        return tuple(
            Tag(
                HERMES.opens[0],
                f'{HERMES.opens[0]}\n{{"name": {json.dumps(f["name"])}, "arguments": ',
                _parameters(f) if f.get("strict") is True else _ANY,
                "}\n",
            )
            for f in functions
        )

    def types(self) -> dict[str, dict[str, str]]:
        """function -> parameter -> its types with `|` between them."""
        functions = [_function(tool) for tool in self.shown]
        return {str(function["name"]): parameter_types(_parameters(function)) for function in functions}


def _function(tool: Tool) -> Mapping[str, object]:
    function = tool["function"]
    assert isinstance(function, Mapping), "`_tool` has looked"
    return function


def _parameters(function: Mapping[str, object]) -> Mapping[str, object]:
    given = function.get("parameters")
    return given if isinstance(given, Mapping) and given else _NONE


def _list_of(functions: Sequence[Mapping[str, object]], most: int | None) -> Mapping[str, object]:
    """Each function's own definitions move to the front, where their references find them."""
    definitions: dict[str, object] = {}
    calls = []
    for function in functions:
        parameters = dict(_parameters(function))
        for key in ("$defs", "definitions"):
            own = parameters.pop(key, None)
            if isinstance(own, Mapping):
                prefix = f"{function['name']}."
                definitions |= {prefix + name: _moved(value, prefix) for name, value in own.items()}
                parameters = {name: _moved(value, prefix) for name, value in parameters.items()}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    whole: dict[str, object] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if most is not None:
        whole["maxItems"] = most
    return {**whole, "$defs": definitions} if definitions else whole


def _moved(value: object, prefix: str) -> object:
    if isinstance(value, Mapping):
        moved = {key: _moved(item, prefix) for key, item in value.items()}
        target = value.get("$ref")
        if isinstance(target, str):
            moved["$ref"] = re.sub(r"^#/(\$defs|definitions)/", f"#/$defs/{prefix}", target)
        return moved
    return [_moved(item, prefix) for item in value] if isinstance(value, list) else value


def tools_of(fields: Fields) -> Tools:
    """Raises RequestError naming what is wrong with a tool or with the choice."""
    fields.entries("tools", MAX_TOOLS)
    tools = tuple(_tool(tool) for tool in fields.sections("tools") if not passes_hosted(tool))
    names = [str(_function(tool)["name"]) for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"tools: {shown(twice)} is there twice", param="tools")
    choice, named = _choice(fields, names)
    return Tools(tools, choice, named, fields.flag("parallel_tool_calls", True))


def _tool(tool: Fields) -> Tool:
    kind = tool.text("type")
    if kind != "function":
        name = tool.name("type")
        raise RequestError(f"{name}: {shown(kind)} is not served, only function tools are", param=name)
    function = tool.section("function")
    if function is None:
        tool.refuse("function", "an object")
    called = function.text("name")
    if called is None or not _NAME.fullmatch(called):
        raise RequestError(
            f"{function.name('name')}: {shown(called)} is not 1 to 128 letters, digits, or any of _ . : -",
            param=function.name("name"),
        )
    function.section("parameters")
    function.flag("strict")
    return tool.raw()


def _choice(fields: Fields, names: Sequence[str]) -> tuple[str, str]:
    value = fields.get("tool_choice")
    if value is None:
        return ("auto" if names else "none"), ""
    if isinstance(value, str) and value in ("auto", "none", "required"):
        if value == "required" and not names:
            raise RequestError(
                "tool_choice: required, and tools is empty; send at least one", param="tool_choice"
            )
        return value, ""
    section = fields.section("tool_choice") if isinstance(value, dict) else None
    if section is None or section.text("type") != "function":
        raise RequestError(
            f"tool_choice: {shown(value)} is none of auto, none, required or a function", param="tool_choice"
        )
    named = (section.section("function") or section).text("name")
    if named is None or named not in names:
        raise RequestError(f"tool_choice: {shown(named)} is none of the tools", param="tool_choice")
    return "required", named


def told_in_words(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Tool]
) -> tuple[Mapping[str, object], ...]:
    """Messages for a template that knows no tools: they are described in Hermes' form, calls and results are text."""
    plain = [_in_words(message) for message in messages]
    if not tools:
        return tuple(plain)
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    words = (
        "You may call functions. They are, one JSON object per line:\n<tools>\n" + lines + "\n</tools>\n"
        'For each call write: <tool_call>\n{"name": <function-name>, "arguments": <object>}\n</tool_call>'
    )
    if plain[0].get("role") == "system":
        first = {**plain[0], "content": f"{plain[0].get('content') or ''}\n\n{words}"}
        return (first, *plain[1:])
    return ({"role": "system", "content": words}, *plain)


def _in_words(message: Mapping[str, object]) -> Mapping[str, object]:
    if message.get("role") == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>",
        }
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    said = [str(message["content"])] if message.get("content") else []
    for call in calls:
        function = call["function"]
        told = {"name": function.get("name"), "arguments": function.get("arguments")}
        said.append(f"<tool_call>\n{json.dumps(told, ensure_ascii=False)}\n</tool_call>")
    return {"role": "assistant", "content": "\n".join(said)}
