"""The tools of a response as plain functions: namespaces are flattened, free text is one argument, and calls map back.

A namespace's function is shown to the model as NAMESPACE__NAME. A custom tool takes text instead of arguments: it is
shown as a function with one string.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afserve.errors import RequestError, shown
from afserve.server.bodies.declared import MAX_TOOLS
from afserve.server.bodies.fields import Fields, or_else
from afserve.server.bodies.unsupported import OF_TOOLS, passes_hosted, refuse_known
from afserve.server.surfaces.translate import Body

_INPUT = "input"
_FREE: Body = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """What a client calls one function; `path` is where it stands in the request."""

    name: str
    namespace: str | None
    custom: bool
    path: str
    function: Body

    @property
    def flat(self) -> str:
        """What the model calls it."""
        return flat_name(self.name, self.namespace)


def flat_name(name: str, namespace: object) -> str:
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def offered_tools(fields: Fields) -> Sequence[OfferedTool]:
    """Hosted tools are passed over. Raises RequestError that names the field."""
    fields.entries("tools", MAX_TOOLS)
    return [each for tool in fields.sections("tools") for each in _offered(tool)]


def called_tools(tools: object) -> Mapping[str, OfferedTool]:
    """The tools of a request that was translated before, by what the model calls them."""
    return {each.flat: each for each in offered_tools(Fields({"tools": tools}))}


def tool_choice(fields: Fields, offered: Sequence[OfferedTool]) -> object:
    """As a chat has it: a function that is named there has its flat name."""
    choice = fields.get("tool_choice")
    section = fields.section("tool_choice") if isinstance(choice, dict) else None
    if section is None or section.get("type") not in ("function", "custom"):
        return choice
    name, custom = section.text("name"), section.get("type") == "custom"
    spaces = (None, section.text("namespace"))
    for each in offered:
        if (each.name, each.custom) == (name, custom) and (spaces[1] is None or each.namespace in spaces):
            return {"type": "function", "function": {"name": each.flat}}
    raise RequestError.about("tool_choice", f"{shown(name)} is none of the tools")


def free_arguments(text: str) -> str:
    """The text of a custom call as its function's arguments."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def free_text(arguments: str) -> str:
    """The other way round; of arguments that were cut off, what there is of the text."""
    for end in ("", '"}', '\\"}'):
        try:
            found = json.loads(arguments + end)
        except (ValueError, RecursionError):
            continue
        return str(found.get(_INPUT, "")) if isinstance(found, dict) else arguments
    return ""


def _offered(tool: Fields, namespace: str | None = None) -> Sequence[OfferedTool]:
    kind = tool.text("type")
    if passes_hosted(tool):
        return []
    if kind == "namespace" and namespace is None:
        return _members(tool)
    if kind not in ("function", "custom"):
        raise tool.refusal(
            "type", f"{shown(kind)} is not served, only functions, custom tools and namespaces of them are"
        )
    refuse_known(tool, OF_TOOLS)
    made = _custom(tool) if kind == "custom" else tool.given("description", "parameters", "strict")
    name = or_else(tool.text("name"), "")
    flat = flat_name(name, namespace)
    return [OfferedTool(name, namespace, kind == "custom", tool.path, {**made, "name": flat or None})]


def _members(tool: Fields) -> Sequence[OfferedTool]:
    """The functions of a namespace, whose description leads that of the first."""
    name = tool.text("name")
    if not name:
        tool.refuse_field("name", "a string")
    found = [each for member in tool.sections("tools") for each in _offered(member, name)]
    about = tool.text("description")
    if found and about:
        first = found[0].function
        first["description"] = "\n\n".join(filter(None, (about, str(first.get("description") or ""))))
    return found


def _custom(tool: Fields) -> Body:
    """A grammar of its text is told to the model, which is not held to it."""
    about = or_else(tool.text("description"), "")
    form = tool.section("format")
    if form is not None and form.get("type") not in (None, "text"):
        name = f"tools.{tool.get('name')}.format"
        tool.pass_over(name, "the text of a custom tool is free; use a function with strict")
        about += f"\n\nIts input follows this {or_else(form.text('syntax'), 'grammar')} grammar:\n"
        about += or_else(form.text("definition"), "")
    return {"description": about, "parameters": _FREE}
