"""The types of a function's parameters, as its schema has them, and the JSON of a text that is to have one of them.

Follows `type`, `enum`, `const`, `nullable`, `anyOf`, `oneOf`, `allOf` and references into the same schema, a bounded
number of steps; what it cannot follow may be anything.
"""

import json
import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from afserve.server.reading.literal import json_literal

ANY = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
MOST_STEPS = 64  # of one parameter
OTHERS = ""
_LEADS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
_INTEGER = re.compile(r"\s*\+?(-?)0*([0-9]+)\s*")
Schema = Mapping[str, object]


def parameter_types(schema: Schema) -> dict[str, str]:
    """parameter -> its types with `|` between them; OTHERS has those of parameters without a name of their own."""
    found: dict[str, str] = {}
    for part in _parts(schema, schema, iter(range(MOST_STEPS))):
        properties, others = part.get("properties"), part.get("additionalProperties")
        named = dict(properties) if isinstance(properties, Mapping) else {}
        if isinstance(others, Mapping):
            named[OTHERS] = others
        for key, value in named.items():
            kinds = kinds_of(value, schema, iter(range(MOST_STEPS)))
            found.setdefault(key, "|".join(sorted(kinds)))
    return found


def _parts(schema: object, root: Schema, steps: Iterator[int]) -> Iterator[Schema]:
    """A schema of an object, and those that it is made of."""
    if not isinstance(schema, Mapping) or next(steps, None) is None:
        return
    yield schema
    for key in ("allOf", "anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            yield from _parts(branch, root, steps)
    if "$ref" in schema:
        yield from _parts(_target(schema["$ref"], root), root, steps)


def kinds_of(
    schema: object, root: Schema, steps: Iterator[int], refs: frozenset[str] = frozenset()
) -> frozenset[str]:
    """The types that a value may have. An integer is a number, too. `refs` were followed to come here."""
    if not isinstance(schema, Mapping) or next(steps, None) is None:
        return ANY
    kinds = _named(schema.get("type"))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        kinds &= frozenset(_kind_of(json.dumps(one)) for one in values) if isinstance(values, list) else ANY
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            kinds &= frozenset().union(*(kinds_of(branch, root, steps, refs) for branch in branches))
    every = schema.get("allOf")
    for branch in every if isinstance(every, list) else ():
        kinds &= kinds_of(branch, root, steps, refs)
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref not in refs:
        kinds &= kinds_of(_target(ref, root), root, steps, refs | {ref})
    return kinds | {"null"} if schema.get("nullable") is True else kinds


def _named(kind: object) -> frozenset[str]:
    named = frozenset(k for k in (kind if isinstance(kind, list) else [kind]) if k in ANY)
    return (named | {"integer"} if "number" in named else named) or ANY


def _target(reference: object, root: Schema) -> object:
    """What a reference of the form `#/a/b` names; None for all others."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    value: object = root
    for key in unquote(reference[1:]).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def typed(text: str, types: str) -> str:
    """The JSON of an argument that is written as this text. Where it is none of its types, it is a string.

    A string is the text to the last character; what else it might be is tried first where the schema has a choice.
    """
    kinds = frozenset(types.split("|")) & ANY or ANY
    if kinds == {"string"}:
        return _string(text)
    literal = json_literal(text)
    if literal is None:
        return _loose(text, kinds)
    kind = _kind_of(literal)
    if kind == "string":
        return literal if kinds == ANY else _of_string(text, literal, kinds)
    if kind in kinds or "string" not in kinds:
        return literal
    return _string(text)


def _of_string(text: str, literal: str, kinds: frozenset[str]) -> str:
    if "string" in kinds:
        return _string(text)
    held = json_literal(json.loads(literal))
    return held if held is not None and _kind_of(held) in kinds else literal


def _loose(text: str, kinds: frozenset[str]) -> str:
    """Words in another case and numbers with zeros in front, where no string is meant."""
    word = text.strip().lower()
    number = _INTEGER.fullmatch(text)
    if "string" in kinds:
        return _string(text)
    if "boolean" in kinds and word in ("true", "false"):
        return word
    if "null" in kinds and word in ("null", "none"):
        return "null"
    if "integer" in kinds and number is not None:
        return number[1] + number[2]
    return _string(text)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _kind_of(literal: str) -> str:
    lead = _LEADS.get(literal[:1])
    if lead is not None:
        return lead
    whole = literal.lstrip("-").isdigit() or float(literal).is_integer()
    return "integer" if whole else "number"
