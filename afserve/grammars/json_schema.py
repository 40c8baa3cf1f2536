"""The words of JSON Schema: which hold schemas, which hold data, and how large a schema may be.

What stands under `enum`, `const`, `default` and `examples` is data, whatever it looks like. Knows no references and no
grammars.
"""

from collections.abc import Iterator, Mapping
from typing import NoReturn
from urllib.parse import unquote

from afserve.errors import RequestError, shown

Schema = Mapping[str, object] | bool
MAX_DEPTH = 64
MAX_ENTRIES = 1 << 14  # keys and items, of the whole schema
ONE = frozenset({
    "additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
})  # fmt: skip
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
MAPS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)


def refuse_schema(param: str, where: str, why: str) -> NoReturn:
    """`where` is a place inside the schema that came in the field `param`, "" the whole."""
    raise RequestError(f"{param}: {where}: {why}" if where else f"{param}: {why}", param=param)


def below(where: str, key: str | int) -> str:
    """The name of a place: properties.a.items[2]. Keys are cut, since a client wrote them."""
    if isinstance(key, int):
        return f"{where}[{key}]"
    return f"{where}.{key[:64]}" if where else key[:64]


def parts(node: Mapping[str, object], where: str) -> Iterator[tuple[str, object]]:
    """The schemas right below one, whatever stands where a schema should."""
    for key, value in node.items():
        inner = below(where, key)
        if key in MAPS and isinstance(value, Mapping):
            yield from ((below(inner, name), item) for name, item in value.items())
        elif key in LISTS and isinstance(value, list):
            yield from ((below(inner, i), item) for i, item in enumerate(value))
        elif key in ONE:
            yield inner, value


def check_size(schema: object, param: str) -> None:
    """Raises RequestError for one that is too deep or has too many entries; looks at no more than it may have."""
    level: list[object] = [schema]
    entries = 0
    for _ in range(MAX_DEPTH):
        containers = [each for each in level if isinstance(each, dict | list)]
        entries += sum(map(len, containers))
        if entries > MAX_ENTRIES:
            refuse_schema(
                param,
                "",
                f"has more than {MAX_ENTRIES} entries, keys and items counted together; send a smaller schema",
            )
        level = [item for each in containers for item in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    refuse_schema(param, "", f"is nested more than {MAX_DEPTH} deep; send a flatter schema")


class References:
    """Where references lead: JSON pointers, anchors, and ids that stand in the schema itself; nothing is fetched. Of
    one root; `param` is the field that it came in. Raises RequestError for an id that moves other references."""

    def __init__(self, root: Mapping[str, object], param: str) -> None:
        self._root = root
        self._param = param
        self._anchors: dict[str, Mapping[str, object]] = {}
        self._ids: dict[str, Mapping[str, object]] = {"": root}
        self._read()

    def resolve(self, reference: object, where: str) -> tuple[str, object]:
        """The place that it names, and what stands there. Raises RequestError where that is nothing."""
        if not isinstance(reference, str):
            refuse_schema(self._param, where, "is not a string")
        document, _, fragment = reference.partition("#")
        start, fragment = self._ids.get(document), unquote(fragment)
        if start is None:
            refuse_schema(
                self._param,
                where,
                f"{shown(reference)} refers to another document, and nothing is fetched; put it under $defs",
            )
        if fragment.startswith("/"):
            found = _at_pointer(start, fragment[1:].split("/"))
        else:
            found = self._anchors.get(fragment) if fragment else start
        if fragment == "/" and found is None:
            found = start  # how some write the root
        if not isinstance(found, Mapping | bool):
            refuse_schema(
                self._param,
                where,
                f"{shown(reference)} leads to no schema here; what it names must be part of it",
            )
        return reference[:64], found

    def _read(self) -> None:
        waiting: list[tuple[str, object, bool]] = [("", self._root, False)]
        while waiting:
            where, node, moved = waiting.pop()
            if not isinstance(node, Mapping):
                continue
            own = node.get("$id")
            if isinstance(own, str):
                moved = moved or (node is not self._root and not own.startswith("#"))
                self._name(own, node)
            if isinstance(anchor := node.get("$anchor"), str):
                self._anchors.setdefault(anchor, node)
            reference = node.get("$ref")
            if moved and isinstance(reference, str) and reference.startswith("#"):
                refuse_schema(
                    self._param,
                    below(where, "$ref"),
                    "stands below a schema with an $id of its own, where it names another place; leave that $id out",
                )
            waiting += [(place, part, moved) for place, part in parts(node, where)]

    def _name(self, own: str, node: Mapping[str, object]) -> None:
        document, _, anchor = own.partition("#")
        if document:
            self._ids.setdefault(document, node)
        if anchor:
            self._anchors.setdefault(anchor, node)


def _at_pointer(value: object, steps: list[str]) -> object:
    """RFC 6901; None where nothing stands."""
    for step in steps:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isascii() and key.isdigit() and len(key) < 8:
            value = value[int(key)] if int(key) < len(value) else None
        else:
            return None
    return value
