"""The tools of a chat request: which are shown to the model, and what its answer must then be."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afserve.errors import RequestError, shown
from afserve.grammars.grammar import Tag, of_plain_schema, of_tags
from afserve.grammars.json_schema import check_size
from afserve.grammars.schema_reader import plain_schema
from afserve.server.bodies.declared import MAX_TOOLS
from afserve.server.bodies.fields import Fields
from afserve.server.bodies.structured import WantedGrammar
from afserve.server.bodies.unsupported import passes_hosted
from afserve.server.reading.json_calls import HERMES
from afserve.server.reading.kinds import parameter_types

_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
_ANY: Mapping[str, object] = {"type": "object"}
# A function without parameters takes an empty object, as OpenAI has it.
_NONE: Mapping[str, object] = {**_ANY, "properties": {}, "additionalProperties": False}
Tool = Mapping[str, object]
# A tool with it may be called, and its definition stands in a result instead of before the conversation.
TOLD_BY_RESULT = "told_by_result"


@dataclass(frozen=True, slots=True)
class Tools:
    """`choice`: auto, none or required; `named` is the one function that is called, whatever the model thinks.
    `parallel`: whether there may be several calls, None where nothing was said."""

    shown: tuple[Tool, ...] = ()
    choice: str = "none"
    named: str = ""
    parallel: bool | None = None

    @property
    def are_used(self) -> bool:
        return bool(self.shown) and self.choice != "none"

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return bool(self.named) or self.choice == "required"

    def wanted_grammar(self) -> WantedGrammar | None:
        """Of an answer that must be calls: a list of them, or the arguments of the named one. None: text.

        It is one call unless several were asked for: a small model begins a second one rather than to end.
        Raises RequestError that names the function whose parameters are no schema that can be held.
        """
        if not self.forced:
            return None
        asked = self._asked()
        parts = self._parts(asked)
        if self.named:
            return parts[0]
        return WantedGrammar("tools", of_plain_schema(self._calls(asked), "tools"), parts)

    def _asked(self) -> list[int]:
        return [i for i, tool in enumerate(self.shown) if self.named in ("", _function(tool)["name"])]

    def _calls(self, asked: Sequence[int]) -> Mapping[str, object]:
        names = [str(_function(self.shown[i])["name"]) for i in asked]
        return _list_of(names, [self._closed(i) for i in asked], most=None if self.parallel else 1)

    def wanted_tags(self, *, special: bool) -> WantedGrammar:
        """Of text with calls in it, those of strict functions held to their schemas; `special` as `of_tags` has it."""
        strict = [i for i, tool in enumerate(self.shown) if _function(tool).get("strict") is True]
        return WantedGrammar("tools", of_tags(self.tags(), special=special), self._parts(strict))

    def _parts(self, asked: Sequence[int]) -> tuple[WantedGrammar, ...]:
        return tuple(WantedGrammar(_field(i), of_plain_schema(self._closed(i), _field(i))) for i in asked)

    def _closed(self, index: int) -> dict[str, object]:
        """The arguments of one function, as the compiler takes them."""
        function = _function(self.shown[index])
        prefix = f"{function['name']}."
        return plain_schema(_parameters(function), _field(index), closed=True, arguments=True, prefix=prefix)

    @property
    def strict(self) -> str:
        """The name of a function whose arguments must follow its schema wherever the model calls it; "" for none."""
        return next((str(f["name"]) for f in map(_function, self.shown) if f.get("strict") is True), "")

    def tags(self) -> tuple[Tag, ...]:
        """Calls in Hermes' form in running text; a function that is not strict takes any object."""
        return tuple(
            Tag(
                HERMES.opens[0],
                f'{HERMES.opens[0]}\n{{"name": {json.dumps(function["name"])}, "arguments": ',
                self._closed(i) if function.get("strict") is True else _ANY,
                "}\n",
            )
            for i, function in enumerate(map(_function, self.shown))
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


def _field(index: int) -> str:
    return f"tools[{index}].function.parameters"


def _list_of(
    names: Sequence[str], schemas: Sequence[Mapping[str, object]], most: int | None
) -> Mapping[str, object]:
    """Calls of these functions. Their definitions, whose names differ, move to the front."""
    definitions: dict[str, object] = {}
    calls = []
    for name, schema in zip(names, schemas, strict=True):
        own = schema.get("$defs")
        definitions |= own if isinstance(own, Mapping) else {}
        parameters = {key: value for key, value in schema.items() if key != "$defs"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    whole: dict[str, object] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if most is not None:
        whole["maxItems"] = most
    return {**whole, "$defs": definitions} if definitions else whole


def tools_of(fields: Fields) -> Tools:
    """Raises RequestError naming what is wrong with a tool or with the choice."""
    tools = tuple(_tool(tool) for tool in fields.sections("tools", MAX_TOOLS) if not passes_hosted(tool))
    names = [str(_function(tool)["name"]) for tool in tools]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise RequestError.about("tools", f"{shown(twice)} is there twice")
    choice, named = _choice(fields, names)
    sent = fields.get("parallel_tool_calls") is not None
    return Tools(tools, choice, named, fields.flag("parallel_tool_calls") if sent else None)


def _tool(tool: Fields) -> Tool:
    kind = tool.text("type")
    if kind != "function":
        raise tool.refusal("type", f"{shown(kind)} is not served, only function tools are")
    function = tool.section("function")
    if function is None:
        tool.refuse_field("function", "an object")
    called = function.text("name")
    if called is None or not _NAME.fullmatch(called):
        raise RequestError.about(
            function.path_of("name"), f"{shown(called)} is not 1 to 128 letters, digits, or any of _ . : -"
        )
    if function.section("parameters") is not None:
        check_size(function.get("parameters"), function.path_of("parameters"))
    function.flag("strict")
    return tool.raw()


def _choice(fields: Fields, names: Sequence[str]) -> tuple[str, str]:
    value = fields.get("tool_choice")
    if value is None:
        return ("auto" if names else "none"), ""
    if isinstance(value, str) and value in ("auto", "none", "required"):
        if value == "required" and not names:
            raise RequestError.about("tool_choice", "required, and tools is empty; send at least one")
        return value, ""
    section = fields.section("tool_choice") if isinstance(value, dict) else None
    if section is None or section.text("type") != "function":
        raise RequestError.about(
            "tool_choice", f"{shown(value)} is none of auto, none, required or a function"
        )
    named = (section.section("function") or section).text("name")
    if named is None or named not in names:
        raise RequestError.about("tool_choice", f"{shown(named)} is none of the tools")
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
