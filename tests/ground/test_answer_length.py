"""The shortest answer to a schema, against one that is built by trying every way; what can never end is refused."""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.errors import RequestError
from afserve.grammars.answer_length import answer_lengths
from afserve.grammars.regex_length import MAX_FORCED
from afserve.grammars.schema_reader import plain_schema

NAMES = ("a", "b", "c")
ROOT = {"$ref": "#"}
leaves = st.sampled_from([
    {"type": "null"}, {"type": "integer"}, {"type": "string", "minLength": 3}, {"const": "x"},
    {"enum": [[1, 2], "xyz"]}, {"type": "array", "maxItems": 0}, {"type": ["boolean", "object"]},
])  # fmt: skip
references = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in NAMES])


def composed(inner):
    """Objects, arrays and choices."""
    properties = st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=2)
    objects = properties.flatmap(
        lambda held: st.sets(st.sampled_from(sorted(held))).map(
            lambda required: {"type": "object", "properties": held, "required": sorted(required)}
        )
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner, "minItems": st.integers(0, 3)},
        optional={"prefixItems": st.lists(inner, min_size=1, max_size=2)},
    )
    choices = st.lists(inner, min_size=1, max_size=3)
    return objects | arrays | choices.map(lambda each: {"anyOf": each})


schemas = st.recursive(references | leaves, composed, max_leaves=4)
definitions = st.fixed_dictionaries({name: composed(references | leaves) for name in NAMES})


def text_of(value):
    return json.dumps(value, separators=(",", ":"))


def shortest(schema, held, depth):
    """The shortest of all values whose references lead no deeper, in a list; an empty one where there is none."""
    inner = [schema]
    if "$ref" in schema:
        return shortest(held[schema["$ref"][-1]], held, depth - 1) if depth else []
    if "anyOf" in schema:
        inner = [value for each in schema["anyOf"] for value in shortest(each, held, depth)]
    elif "const" in schema or "enum" in schema:
        inner = schema.get("enum") or [schema["const"]]
    elif schema.get("required"):
        values = [(key, shortest(schema["properties"][key], held, depth)) for key in schema["required"]]
        inner = [{key: value for key, (value,) in values}] if all(value for _, value in values) else []
    elif schema.get("minItems"):
        heads = schema.get("prefixItems", [])
        items = [*heads, *[schema["items"]] * 3][: schema["minItems"]]
        values = [shortest(each, held, depth) for each in items]
        inner = [[value for (value,) in values]] if all(values) else []
    else:
        kind = schema["type"] if isinstance(schema["type"], str) else "boolean"
        inner = [
            {"null": None, "integer": 1, "string": "xyz", "array": [], "object": {}, "boolean": True}[kind]
        ]
    if schema.get("type") == ["boolean", "object"]:
        inner = [{}]
    return [min(inner, key=lambda value: len(text_of(value)))] if inner else []


@settings(max_examples=300)
@given(schemas, definitions)
def test_as_short_as_the_best_of_all_ways_or_refused(schema, held):
    """All definitions are led to, from places that need not be there; no way is left into what never ends."""
    led = {name: {"$ref": f"#/$defs/{name}"} for name in NAMES}
    properties = {"properties": {"answer": schema, **led}, "required": ["answer"]}
    whole = {"type": "object", **properties, "$defs": held}
    if not (found := shortest(schema, held, 4)):
        with pytest.raises(RequestError, match=r"^f: an answer could not end") as refused:
            plain_schema(whole, "f")
        assert refused.value.param == "f"
        return
    assert allows(whole, {"answer": found[0]}) is not False
    plain = plain_schema(whole, "f")
    assert lengths_of(plain) == {"object": len(text_of({"answer": found[0]}))}
    for name, node in (kept := plain["$defs"]).items():
        assert lengths_of({"allOf": [node], "$defs": kept}), name
    for name in NAMES:
        for value in shortest(held[name], held, 4):
            assert allows(plain, {"answer": found[0], name: value}) is not False


def allows(schema, value):
    """None where jsonschema cannot follow it: a choice that leads to itself first."""
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(value)
    except RecursionError:
        return None


def lengths_of(plain):
    lengths, endless = answer_lengths(plain, "f", dict.fromkeys(plain.get("$defs", ()), ""))
    assert not endless
    return lengths


values = st.recursive(
    st.sampled_from([None, 1, "x", "xyz", True]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
    max_leaves=4,
)
asked = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "array", ["object", "null"], ["array", "string"]]),
        "properties": st.dictionaries(st.sampled_from(NAMES), references | leaves, max_size=2),
        "required": st.lists(st.sampled_from(NAMES), max_size=2),
        "additionalProperties": references | st.booleans(),
        "patternProperties": st.fixed_dictionaries({"^[xc]": references | leaves}),
        "minProperties": st.integers(0, 2),
        "items": references | st.booleans(),
        "minItems": st.integers(0, 2),
        "minLength": st.integers(0, 3),
        "anyOf": st.lists(references | leaves, min_size=1, max_size=2),
    },
)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.lists(asked, min_size=1, max_size=3),
    st.tuples(*[asked] * 3),
    st.lists(values, min_size=8, max_size=12),
)
def test_no_value_is_shorter(together, held, drawn):
    """Whatever is asked for together, what JSON Schema allows is not said to be impossible, nor to be longer."""
    whole = {"allOf": together, "$defs": dict(zip(NAMES, held, strict=True))}
    try:
        lengths = lengths_of(plain_schema(whole, "f"))
    except RequestError as error:
        if "could not end" not in error.message:
            return  # keys that have two meanings
        lengths = {}
    for value in drawn:
        assert not allows(whole, value) or len(text_of(value)) >= min(lengths.values(), default=1 << 40), (
            value
        )


def needing(key, inner):
    return {"type": "object", "properties": {key: inner}, "required": [key]}


@pytest.mark.parametrize(
    "schema",
    [
        needing("a", ROOT),
        {"anyOf": [needing("a", ROOT), needing("b", ROOT)]},
        {"oneOf": [needing("a", ROOT), {"type": "array", "items": ROOT, "minItems": 1}]},
        {"type": "object", "allOf": [{"properties": {"a": ROOT}}, {"required": ["a"]}]},
        {"type": "object", "properties": {"a": ROOT, "b": ROOT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"type": "object", "minProperties": 1, "additionalProperties": ROOT},
        {"type": "object", "patternProperties": {"^a": ROOT}, "required": ["a"], "additionalProperties": False},
        {"type": "array", "prefixItems": [{}, ROOT], "minItems": 2},
        needing("a", {"anyOf": [ROOT, {"type": "integer", "minimum": 5, "maximum": 3}]}),
        {"anyOf": [ROOT]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("closed", [False, True])
def test_what_never_ends(schema, closed):
    with pytest.raises(RequestError, match=r"^f: .*could not end"):
        plain_schema(schema, "f", closed=closed)


@pytest.mark.parametrize(
    "schema, where",
    [
        ({"type": "array", "minItems": 10**9}, ""),
        ({"type": "array", "minItems": 10**400}, ""),
        ({"type": "object", "minProperties": 10**8}, ""),
        ({"type": "string", "minLength": MAX_FORCED - 1}, ""),
        ({"properties": {"a": {"items": {"minLength": 10**8}}}}, "properties.a.items: "),
        ({"type": ["string", "null"], "minLength": 10**8}, ""),
        ({"type": "array", "minItems": 200, "items": {"type": "string", "minLength": 100}}, ""),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"minItems": 10**8}}}, "#/\\$defs/x: |"),
    ],
)
def test_what_is_too_long(schema, where):
    with pytest.raises(
        RequestError, match=f"^f: ({where})the shortest answer has .* at most {MAX_FORCED} are taken"
    ):
        plain_schema(schema, "f")
    plain_schema({"type": "string", "minLength": MAX_FORCED - 2}, "f")


kinds = st.lists(st.sampled_from(["object", "array", "string", "integer", "null"]), min_size=1, unique=True)


@given(kinds, st.sampled_from(["plain", "ref", "allOf", "anyOf"]))
def test_arguments_are_an_object(types, form):
    inner = {"type": types[0] if len(types) == 1 else types}
    whole = {
        "plain": inner, "ref": {"$ref": "#/$defs/x", "$defs": {"x": inner}}, "allOf": {"allOf": [inner, {}]},
        "anyOf": {"anyOf": [inner, {"type": "array"}]},
    }[form]  # fmt: skip
    if "object" in types:
        plain = plain_schema(whole, "f", closed=True, arguments=True)
        assert form != "plain" or plain["type"] == "object"
        return
    with pytest.raises(RequestError, match="a function's arguments are an object"):
        plain_schema(whole, "f", closed=True, arguments=True)


@pytest.mark.slow
def test_a_schema_that_leads_everywhere_is_bounded():
    """Each of many definitions leads to all, and only the last one ends."""
    held = {str(i): {"anyOf": [needing("a", {"$ref": f"#/$defs/{j}"}) for j in range(40)]} for i in range(40)}
    held["39"]["anyOf"].append({"const": 1})
    assert plain_schema({"$ref": "#/$defs/0", "$defs": held}, "f")
