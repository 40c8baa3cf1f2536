"""Bodies that change the running deployment, as checked values and as JSON schemas: both as the change is declared."""

from collections.abc import Mapping
from typing import Any

from afserve.control.wire.change_values import PHASE_POOLS, POOLS, Argument, Change, Form, Verb
from afserve.errors import RequestError
from afserve.server.bodies.fields import Fields, or_else

_MOST_NODES = 4096
_NUMBER = 'a number of nodes, or a change of it as text: 3, "+1" or "-1"'
_TEXT: Mapping[str, object] = {"type": "string"}


def change_of(verb: Verb, body: Fields) -> Change:
    """Raises RequestError naming the field, or what is missing in the words of the declaration."""
    found: dict[str, Any] = {each.name: _read(verb, each, body) for each in verb.arguments}
    if not found:
        for name in body.raw():
            body.refuse_field(name, "nothing: the body is {}")
    if any(value is None for value in found.values()):
        first = verb.arguments[0]
        raise RequestError(verb.missing, param=None if first.form is Form.COUNTS else first.name)
    return verb.change(**found)


def _read(verb: Verb, asked: Argument, body: Fields) -> object:
    """None where it is needed and not there."""
    match asked.form:
        case Form.TEXT:
            return or_else(body.text(asked.name), asked.default)
        case Form.NUMBER:
            return or_else(body.real(asked.name, 0.0, asked.most), asked.default)
        case Form.NAMES:
            names, every = body.texts(asked.name, _MOST_NODES), body.flag("all")
            return None if bool(names) == every else names
        case Form.COUNTS:
            return _counts(body) or None


def _counts(body: Fields) -> dict[str, str]:
    """{"attention": 3, "experts": "-1"}: a number is how many there shall be, text with a sign a change of it."""
    for pool, value in body.raw().items():
        if isinstance(value, bool) or not isinstance(value, int | str):
            body.refuse_field(pool, _NUMBER)
    return {pool: str(value) for pool, value in body.raw().items()}


def schema_of(verb: Verb) -> Mapping[str, object]:
    properties: dict[str, object] = {}
    for each in verb.arguments:
        match each.form:
            case Form.TEXT:
                properties[each.name] = _TEXT
            case Form.NUMBER:
                properties[each.name] = {"type": "number", "minimum": 0, "maximum": each.most}
            case Form.NAMES:
                properties[each.name] = {"type": "array", "items": _TEXT, "maxItems": _MOST_NODES}
                properties["all"] = {"type": ["boolean", "null"]}
            case Form.COUNTS:
                properties |= {pool: {"type": ["integer", "string"]} for pool in (*POOLS, *PHASE_POOLS)}
    needed = [each.name for each in verb.arguments if each.default is None and each.form is Form.TEXT]
    return {"type": "object", "required": needed, "properties": properties}
