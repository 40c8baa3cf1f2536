"""A client's JSON schema as the grammar compiler takes it: every reference a name under `$defs`, nothing that asks for
nothing, nothing that cannot be held.

`closed` is for the arguments of tools: an object that lists its properties has no others unless it says so, at every
depth. An object that lists none stays open: there is nothing that its keys could be.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NoReturn

from afserve.errors import shown
from afserve.grammars.answer_length import answer_lengths
from afserve.grammars.json_schema import (
    LISTS,
    MAPS,
    MAX_ENTRIES,
    ONE,
    References,
    Schema,
    below,
    check_size,
    parts,
    refuse_schema,
)
from afserve.grammars.regex_length import MAX_FORCED, shortest_length, too_long

# Those that the compiler knows; JSON Schema has unknown ones ignored.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
MAX_CHAIN = 512
MAX_PATTERNS = 32  # patternProperties of one object
MAX_MULTIPLE = 10_000  # a number's remainder is followed digit by digit, in so many states
# Notes for readers, and what has been resolved: none of them is followed.
_NOTES = frozenset({
    "$defs", "definitions", "$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment",
    "title", "description", "default", "examples", "readOnly", "writeOnly", "deprecated", "contentSchema",
    "contentEncoding", "contentMediaType",
})  # fmt: skip
_UNHELD = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "uniqueItems",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef",
})  # fmt: skip
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,), "not": (False,), "propertyNames": (True, {}, {"type": "string"}),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True, {})),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}  # fmt: skip
# Without the key on the right, the one on the left asks for nothing.
_NEEDS = {
    **dict.fromkeys(("minContains", "maxContains"), ("contains",)),
    **dict.fromkeys(("then", "else"), ("if",)),
    "if": ("then", "else"),
}
_SAME_PLACE = ("allOf", "anyOf", "oneOf")
_OPENS = ("additionalProperties", "unevaluatedProperties")


def plain_schema(
    schema: Schema, param: str = "grammar", *, closed: bool = False, arguments: bool = False, prefix: str = ""
) -> dict[str, object]:
    """An equal schema in the compiler's words; its definitions are called `prefix` and a number.
    `arguments`: only objects count.

    Raises RequestError that names `param` and the place where the schema is too large, asks for what cannot be held, or
    has no answer that ends.
    """
    check_size(schema, param)
    if not isinstance(schema, Mapping):
        return {} if schema else {"enum": []}
    return _Reader(param, closed, arguments, prefix, References(schema, param)).read_schema(schema)


@dataclass(slots=True)
class _Reader:
    param: str
    closed: bool
    arguments: bool
    prefix: str
    references: References
    names: dict[tuple[int, bool], str] = field(default_factory=dict)
    waiting: list[tuple[str, str, object, bool]] = field(default_factory=list)
    left: int = 4 * MAX_ENTRIES  # places that may still be looked at

    def read_schema(self, root: Mapping[str, object]) -> dict[str, object]:
        made = self.compound(root, "")
        definitions: dict[str, object] = {}
        places: dict[str, str] = {}
        while self.waiting:
            name, places[name], target, part = self.waiting.pop()
            definitions[name] = self.schema(target, places[name], part=part)
        self.check_chain(made, definitions)
        whole = {**made, "$defs": definitions} if definitions else made
        lengths, endless = answer_lengths(whole, self.param, places)
        if endless:
            whole = _without(whole, endless)
        if not self.arguments:
            return whole
        if lengths and "object" not in lengths:
            self.refuse("", 'a function\'s arguments are an object; write {"type": "object", ...}')
        return whole if any(key in whole for key in (*_SAME_PLACE, "$ref")) else {**whole, "type": "object"}

    def check_chain(self, root: Mapping[str, object], definitions: Mapping[str, object]) -> None:
        """The compiler recurs into what a reference names when it meets it first, in this order."""
        waiting: list[tuple[object, int]] = [(root, 1)]
        seen: set[object] = set()
        while waiting:
            node, depth = waiting.pop()
            if depth > MAX_CHAIN:
                self.refuse(
                    "",
                    f"its references lead through more than {MAX_CHAIN} schemas, one within the other; use fewer",
                )
            if not isinstance(node, Mapping):
                continue
            inner = [part for _, part in parts(node, "")]
            if isinstance(name := node.get("$ref"), str) and name not in seen:
                seen.add(name)
                inner.append(definitions[name.removeprefix("#/$defs/")])
            waiting += [(part, depth + 1) for part in reversed(inner)]

    def refuse(self, where: str, why: str) -> NoReturn:
        refuse_schema(self.param, where, why)

    def schema(self, node: object, where: str, *, part: bool = False) -> object:
        """`part`: an object around it, of the same place, has closed itself for both."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            self.refuse(where, f"{shown(node)} is no schema; one is an object, true or false")
        return self.compound(node, where, part=part)

    def compound(self, node: Mapping[str, object], where: str, *, part: bool = False) -> dict[str, object]:
        self.pay(where)
        together = _composed(node)
        if not part and (together or "patternProperties" in node):
            self.check_patterns(node, where)
        if not part and ("multipleOf" in node or "allOf" in node):
            self.check_multiples(node, where)
        held = part or (self.closed and together)
        made = {
            key: self.read_key(key, value, below(where, key), held)
            for key, value in node.items()
            if not self.asks_nothing(key, node)
        }
        if self.closed and not part:
            self.close(node, made, where)
        return made

    def asks_nothing(self, key: str, node: Mapping[str, object]) -> bool:
        value = node[key]
        if key in _NOTES or any(
            value == each and type(value) is type(each) for each in _NEUTRAL.get(key, ())
        ):
            return True
        if key == "format":
            return isinstance(value, str) and value not in FORMATS
        if key == "unevaluatedProperties":
            return self.closed and value is False
        return key in _NEEDS and not any(name in node for name in _NEEDS[key])

    def read_key(self, key: str, value: object, where: str, held: bool) -> object:
        if key == "$ref":
            return f"#/$defs/{self.definition(value, where, held)}"
        if key in _UNHELD:
            self.refuse(where, "cannot be held while an answer is written; leave it out")
        if key in MAPS:
            if not isinstance(value, Mapping):
                self.refuse(where, f"{shown(value)} is not an object of schemas")
            return {name: self.schema(item, below(where, name)) for name, item in value.items()}
        if key in LISTS and isinstance(value, list):
            part = held and key in _SAME_PLACE
            return [self.schema(item, below(where, i), part=part) for i, item in enumerate(value)]
        if key == "pattern":
            self.check_pattern(value, where)
        return self.schema(value, where) if key in ONE else value

    def check_pattern(self, pattern: object, where: str) -> None:
        if not isinstance(pattern, str):
            self.refuse(where, f"{shown(pattern)} is not a string")
        if (shortest := shortest_length(pattern)) > MAX_FORCED:
            self.refuse(where, too_long(shortest))

    def definition(self, reference: object, where: str, part: bool) -> str:
        place, target = self.references.resolve(reference, where)
        key = (id(target), part and self.closed)
        if key not in self.names:
            self.names[key] = f"{self.prefix}{len(self.names)}"
            self.waiting.append((self.names[key], place, target, part))
        return self.names[key]

    def close(self, node: Mapping[str, object], made: dict[str, object], where: str) -> None:
        """All that any schema of this place lists may be there, and no more."""
        same = list(self.same_place(node, where)) if _composed(node) else [node]
        if any(key in each and each[key] is not False for each in same for key in _OPENS):
            return
        for kind in ("properties", "patternProperties"):
            own = made.get(kind)
            if any(kind in each for each in same):
                others = dict.fromkeys((key for each in same for key in _map(each, kind)), True)
                made[kind] = {**others, **(own if isinstance(own, dict) else {})}
        if "properties" in made or "patternProperties" in made:
            made["additionalProperties"] = False

    def same_place(self, node: Mapping[str, object], where: str) -> Iterator[Mapping[str, object]]:
        """It, and every schema that what it describes must or may follow too."""
        waiting: list[object] = [node]
        seen: set[int] = set()
        while waiting:
            each = waiting.pop()
            if not isinstance(each, Mapping) or id(each) in seen:
                continue
            seen.add(id(each))
            self.pay(where, 1 + len(_map(each, "properties")))
            yield each
            for key in _SAME_PLACE:
                inner = each.get(key)
                waiting += inner if isinstance(inner, list) else []
            if "$ref" in each:
                waiting.append(self.references.resolve(each["$ref"], below(where, "$ref"))[1])

    def check_patterns(self, node: Mapping[str, object], where: str) -> None:
        """A key that is listed and matches a pattern too would have two meanings, of which an answer is held to one."""
        same = list(self.same_place(node, where)) if _composed(node) else [node]
        patterns = dict.fromkeys(pattern for each in same for pattern in _map(each, "patternProperties"))
        keys = dict.fromkeys(key for each in same for key in _map(each, "properties"))
        place = below(where, "patternProperties")
        if len(patterns) > MAX_PATTERNS:
            self.refuse(place, f"has {len(patterns)} patterns, at most {MAX_PATTERNS} are followed")
        for pattern in patterns:
            self.check_pattern(pattern, place)
        for pattern in patterns if keys else ():
            if (key := self.first_match(pattern, keys, place)) is not None:
                self.refuse(
                    place,
                    f"the pattern {shown(pattern)} matches {shown(key)}, which is a key of properties too; let each "
                    "key be described once",
                )

    def check_multiples(self, node: Mapping[str, object], where: str) -> None:
        """Several that hold for one number have a common multiple, which counts."""
        steps = [each["multipleOf"] for each in self.same_place(node, where) if "multipleOf" in each]
        exact = [_exact(step) for step in steps]
        place = below(where, "multipleOf")
        if None in exact:
            self.refuse(place, f"{shown(steps[exact.index(None)])} is not a number above 0")
        states = _common([each for each in exact if each is not None])
        if states > MAX_MULTIPLE:
            self.refuse(
                place,
                f"{' and '.join(map(shown, steps[:2]))} takes more than {MAX_MULTIPLE} remainders to follow; use a "
                "rounder number",
            )

    def first_match(self, pattern: str, keys: Mapping[str, object], where: str) -> str | None:
        """In time that grows with the text, whatever the pattern."""
        import re2  # only schemas with both need it

        options = re2.Options()
        options.log_errors = False
        try:
            compiled = re2.compile(pattern, options)
        except re2.error:
            self.refuse(
                where,
                f"whether {shown(pattern)} matches a key of properties cannot be decided; write it more simply",
            )
        return next((key for key in keys if compiled.search(key)), None)

    def pay(self, where: str, places: int = 1) -> None:
        self.left -= places
        if self.left < 0:
            self.refuse(where, "with its references the schema becomes too large; send a smaller one")


def _without(whole: dict[str, object], endless: Collection[str]) -> dict[str, object]:
    """The same, with no way into these definitions: the compiler takes them for what an answer may begin."""
    kept = {key: node for key, node in _map(whole, "$defs").items() if key not in endless}
    waiting: list[object] = [whole := {**whole, "$defs": kept}]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if str(node.get("$ref")).removeprefix("#/$defs/") in endless:
                node.clear()
                node["enum"] = []
            waiting += [part for _, part in parts(node, "")]
    return whole


def _composed(node: Mapping[str, object]) -> bool:
    """Whether several schemas say together what stands in this place."""
    own = "properties" in node or "patternProperties" in node
    return "allOf" in node or (own and any(key in node for key in ("anyOf", "oneOf", "$ref")))


def _exact(step: object) -> Decimal | None:
    if isinstance(step, bool) or not isinstance(step, int | float) or not 1e-15 < abs(step) < 1e15:
        return None
    return abs(Decimal(repr(step)))


def _common(steps: Sequence[Decimal]) -> int:
    """The least common multiple, in units of the last decimal place of any: 25 for 0.25, 300 for 0.25 and 3."""
    places = max((-int(step.normalize().as_tuple().exponent) for step in steps), default=0)
    return math.lcm(*(int(step.scaleb(max(places, 0))) for step in steps)) if steps else 1


def _map(node: Mapping[str, object], key: str) -> Mapping[str, object]:
    found = node.get(key)
    return found if isinstance(found, Mapping) else {}
