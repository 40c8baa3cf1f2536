"""How long the shortest answer to a schema is, of each JSON type, without compiling it. One that has to hold itself
again and again has none.

Counted in characters of JSON without spaces, and never as more than it is: what is hard to count is passed over. Reads
what `plain_schema` has made.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from afserve.grammars.json_schema import MAX_ENTRIES, below, refuse_schema
from afserve.grammars.regex_length import MAX_FORCED, MOST, shortest_length, too_long

NEVER = float("inf")
Lengths = dict[str, float]  # by type; one that no answer has is left out
Node = Mapping[str, object]
_LEAST: Lengths = {"null": 4, "boolean": 4, "number": 1, "string": 2, "array": 2, "object": 2}
_KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
_RANGES = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "number": ("minimum", "maximum"),
    "object": ("minProperties", "maxProperties"),
}
_MOST = 16 * MAX_ENTRIES  # schemas that are looked at: half a second
_NAMED = 256  # characters of the name of a place: references may lead through many
_CHOICES, _JOINED = ("anyOf", "oneOf"), ("allOf", "$ref")


def answer_lengths(root: Node, param: str, names: Mapping[str, str]) -> tuple[Lengths, set[str]]:
    """Of `root`, and the keys of its definitions that no answer ends with; `names` are what they are called, by key.

    Raises RequestError that names a place with no answer of MAX_FORCED characters, or says that the root has none."""
    found = root.get("$defs")
    definitions = found if isinstance(found, Mapping) else {}
    reader = _Reader(param, definitions)
    whole = reader.place_of([root], "")
    inner = {key: reader.place_of([node], names[key]) for key, node in definitions.items()}
    reader.settle_lengths()
    if definitions and not whole.lengths:
        why = "an answer could not end: it must hold itself again and again, or what is asked for excludes itself"
        refuse_schema(param, "", why)
    for place in reversed(reader.places):
        longest = max(place.lengths.values(), default=0)
        if longest > MAX_FORCED:
            refuse_schema(param, place.where, too_long(int(longest), "answer"))
    return whole.lengths, {key for key, place in inner.items() if not place.lengths}


@dataclass(slots=True, eq=False)
class _Place:
    """Where some schemas hold together; `users` are the numbers of the places whose lengths follow from it."""

    number: int
    where: str
    nodes: Sequence[Node]
    lengths: Lengths = field(default_factory=dict)
    users: set[int] = field(default_factory=set)

    def most_asked(self, key: str, default: float = 0) -> float:
        """The most that any of them asks for."""
        return max((n for node in self.nodes if (n := _number(node, key)) is not None), default=default)


class _Reader:
    """Lengths come down from never until none changes; what was found last is read first: the inner."""

    def __init__(self, param: str, definitions: Node) -> None:
        self.places: list[_Place] = []
        self._param, self._definitions = param, definitions
        self._found: dict[frozenset[int], _Place] = {}
        self._bare: dict[int, Node] = {}
        self._waiting: list[int] = []
        self._left = _MOST

    def place_of(self, schemas: Iterable[object], where: str) -> _Place:
        same: dict[int, Node] = {}
        waiting = list(schemas)
        while waiting:
            node = waiting.pop()
            if node is False:
                return _Place(0, where, ())
            if not isinstance(node, Mapping) or id(node) in same:
                continue
            same[id(node)] = node
            waiting += _items(node, "allOf")
            if "$ref" in node:
                waiting.append(self._definitions[str(node["$ref"]).removeprefix("#/$defs/")])
        self._left -= 1 + len(same)
        if self._left < 0:
            why = "with its references the schema becomes too large; send a smaller one"
            refuse_schema(self._param, where[:_NAMED], why)
        nodes = {key: node for key, node in same.items() if any(word not in _JOINED for word in node)}
        found = self._found.get(frozenset(nodes))
        if found is None:
            found = _Place(len(self.places), where[:_NAMED], tuple(nodes.values()))
            self._found[frozenset(nodes)] = found
            self.places.append(found)
            heappush(self._waiting, -found.number)
        return found

    def settle_lengths(self) -> None:
        while self._waiting:
            place = self.places[-heappop(self._waiting)]
            while self._waiting and self._waiting[0] == -place.number:
                heappop(self._waiting)
            lengths = self._read(place)
            if lengths != place.lengths:
                place.lengths = lengths
                for user in place.users:
                    heappush(self._waiting, -user)

    def _read(self, place: _Place) -> Lengths:
        found = dict(_LEAST)
        for own in map(_own, place.nodes):
            found = _both(found, own)
        for kind, (low, high) in _RANGES.items():
            if kind not in found:
                continue
            most = min((n for node in place.nodes if (n := _number(node, high)) is not None), default=NEVER)
            length = self._of_kind(kind, place) if place.most_asked(low, -NEVER) <= most else NEVER
            if length < NEVER:
                found[kind] = max(found[kind], length)
            else:
                del found[kind]
        for node in place.nodes:
            for key in _CHOICES:
                if isinstance(node.get(key), list):
                    found = _both(found, self._choice(place, node, key))
        return found

    def _of_kind(self, kind: str, place: _Place) -> float:
        if kind == "array":
            return self._array(place)
        if kind == "object":
            return self._object(place)
        return _string(place) if kind == "string" else 0

    def _choice(self, place: _Place, node: Node, key: str) -> Lengths:
        """Each branch with what else is asked for in this place, other choices left out."""
        around = [self._alone(each) for each in place.nodes]
        shortest: Lengths = {}
        for i, branch in enumerate(_items(node, key)):
            for kind, length in self._inner(
                place, [*around, branch], below(below(place.where, key), i)
            ).items():
                shortest[kind] = min(length, shortest.get(kind, NEVER))
        return shortest

    def _alone(self, node: Node) -> Node:
        """The same one every time: a place is known by its nodes."""
        joined = (*_CHOICES, *_JOINED)
        if id(node) not in self._bare and any(key in node for key in joined):
            self._bare[id(node)] = {key: value for key, value in node.items() if key not in joined}
        return self._bare.get(id(node), node)

    def _inner(self, place: _Place, schemas: Iterable[object], where: str) -> Lengths:
        inner = self.place_of(schemas, where)
        inner.users.add(place.number)
        return inner.lengths

    def _least(self, place: _Place, schemas: Iterable[object], *steps: str | int) -> float:
        where = place.where
        for step in steps:
            where = below(where, step)
        return min(self._inner(place, schemas, where).values(), default=NEVER)

    def _array(self, place: _Place) -> float:
        heads = [_items(node, "prefixItems") or _items(node, "items") for node in place.nodes]
        rests = [
            node.get("additionalItems" if _items(node, "items") else "items", True) for node in place.nodes
        ]
        least = place.most_asked("minItems")
        length = 2 + max(least - 1, 0)
        longest = max(map(len, heads), default=0)
        for i in range(longest):
            each = [head[i] if i < len(head) else rest for head, rest in zip(heads, rests, strict=True)]
            item = self._least(place, each, "prefixItems", i)
            length += item if i < least else 0
        item = self._least(place, rests, "items")
        return length + ((least - longest) * item if least > longest else 0)

    def _object(self, place: _Place) -> float:
        required = {key for node in place.nodes for key in _items(node, "required") if isinstance(key, str)}
        listed = dict.fromkeys(key for node in place.nodes for key in _map(node, "properties"))
        patterns = [
            (key, inner) for node in place.nodes for key, inner in _map(node, "patternProperties").items()
        ]
        free = [node.get("additionalProperties", True) for node in place.nodes]
        others = [self._least(place, [inner], "patternProperties", key) for key, inner in patterns]
        others.append(self._least(place, free, "additionalProperties"))
        length = 2 + max(least := max(place.most_asked("minProperties"), len(required)), 1) - 1
        for key in listed:
            each = [
                _map(node, "properties").get(key, True if "patternProperties" in node else rest)
                for node, rest in zip(place.nodes, free, strict=True)
            ]
            value = self._least(place, each, "properties", key)
            if key in required:
                length += len(json.dumps(key, ensure_ascii=False)) + 1 + value
            else:
                others.append(value)
        shortest = min(others)
        length += sum(
            len(json.dumps(key, ensure_ascii=False)) + 1 + shortest for key in required - listed.keys()
        )
        return length + ((least - len(required)) * (3 + shortest) if least > len(required) else 0)


def _string(place: _Place) -> float:
    patterns = [str(node["pattern"]) for node in place.nodes if "pattern" in node]
    return 2 + max([place.most_asked("minLength"), *map(shortest_length, patterns)])


def _own(node: Node) -> Lengths:
    """By its type and its values."""
    found = _LEAST
    if "type" in node:
        kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
        named = ["number" if kind == "integer" else str(kind) for kind in kinds]
        found = {kind: _LEAST[kind] for kind in named} if all(kind in _LEAST for kind in named) else found
    if "const" in node or isinstance(node.get("enum"), list):
        values: Lengths = {}
        for value in [node["const"]] if "const" in node else _items(node, "enum"):
            kind = _KINDS.get(type(value), "null")
            length = len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
            values[kind] = min(1 if kind == "number" else length, values.get(kind, NEVER))
        found = _both(found, values)
    return found


def _both(one: Lengths, other: Lengths) -> Lengths:
    return {kind: max(length, other[kind]) for kind, length in one.items() if kind in other}


def _number(node: Node, key: str) -> float | None:
    value = node.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return max(-MOST, min(value, MOST))


def _items(node: Node, key: str) -> Sequence[object]:
    found = node.get(key)
    return found if isinstance(found, list) else ()


def _map(node: Node, key: str) -> Node:
    found = node.get(key)
    return found if isinstance(found, Mapping) else {}
