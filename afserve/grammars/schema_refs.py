"""Where the references of one JSON schema lead: JSON pointers, anchors, and ids that stand in the schema itself.

Nothing is fetched: a reference to another document is refused.
"""

from collections.abc import Mapping
from urllib.parse import unquote

from afserve.errors import shown
from afserve.grammars.json_schema import below, parts, refuse_schema


class References:
    """Of one root; `param` is the field that it came in. Raises RequestError for an id that moves other references."""

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
        """Ids and anchors of every schema in it."""
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
