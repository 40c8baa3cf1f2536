"""Schemas of clients: references of every form, what asks for nothing, what is refused, closed arguments of tools."""

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.errors import RequestError
from afserve.grammars.json_schema import MAX_DEPTH, MAX_ENTRIES
from afserve.grammars.schema_reader import FORMATS, plain_schema

# Names with what JSON pointers and URIs write in another way.
KEYS = ("a", "b/c", "d~e", "f%g", "h i", "")
ESCAPED = {"b/c": "b~1c", "d~e": "d~0e", "f%g": "f%25g", "h i": "h%20i"}
LEAVES = (
    {"type": "integer"},
    {"type": "string"},
    {"enum": ["x", 1, None]},
    {"type": "boolean"},
    True,
    {"minimum": 3},
)


def pointers(schema, place="#"):
    """The pointer of every schema in it."""
    yield place
    if not isinstance(schema, dict):
        return
    for holder in ("properties", "$defs"):
        for key, inner in schema.get(holder, {}).items():
            yield from pointers(inner, f"{place}/{holder}/{ESCAPED.get(key, key)}")
    if "items" in schema:
        yield from pointers(schema["items"], f"{place}/items")
    for i, inner in enumerate(schema.get("anyOf", ())):
        yield from pointers(inner, f"{place}/anyOf/{i}")


def leaves(schema):
    """Where a leaf stands, as (holder, key)."""
    for holder in ("properties", "$defs"):
        for key, inner in schema.get(holder, {}).items():
            if isinstance(inner, dict) and ({"properties", "items", "anyOf"} & set(inner)):
                yield from leaves(inner)
            else:
                yield schema[holder], key


trees = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(st.sampled_from(KEYS), inner, min_size=1),
            },
            optional={"required": st.lists(st.sampled_from(KEYS), unique=True, max_size=2)},
        ),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
    ),
    max_leaves=6,
)


@st.composite
def referring(draw):
    """A schema with references from leaves to places that are deeper in no cycle of references alone."""
    root = draw(
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(st.sampled_from(KEYS), trees, min_size=1),
                "$defs": st.dictionaries(st.sampled_from(KEYS), trees, min_size=1, max_size=2),
            }
        )
    )
    copied = copy_of(root)
    targets = [place for place in pointers(copied) if place == "#" or not is_leaf(copied, place)]
    for holder, key in list(leaves(copied)):
        if draw(st.booleans()):
            holder[key] = {"$ref": draw(st.sampled_from(targets))}
    return copied


def copy_of(value):
    if isinstance(value, dict):
        return {key: copy_of(inner) for key, inner in value.items()}
    return [copy_of(inner) for inner in value] if isinstance(value, list) else value


def is_leaf(root, pointer):
    found = root
    for step in pointer.split("/")[1:]:
        key = next((k for k, escaped in ESCAPED.items() if escaped == step), step)
        found = found[int(key)] if isinstance(found, list) else found[key]
    return not (isinstance(found, dict) and {"properties", "items"} & set(found))


values = st.recursive(
    st.sampled_from([1, 4, "x", "y", None, True]),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from((*KEYS, "z")), inner), st.lists(inner, max_size=2)
    ),
    max_leaves=8,
)


def accepts(schema, value):
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def references(schema):
    if isinstance(schema, dict):
        yield from ([schema["$ref"]] if isinstance(schema.get("$ref"), str) else [])
        for inner in schema.values():
            yield from references(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from references(inner)


@pytest.mark.slow
@settings(max_examples=40)
@given(referring(), st.lists(values, min_size=4, max_size=8))
def test_a_schema_with_references_means_the_same(schema, drawn):
    plain = plain_schema(schema, prefix="f.")
    assert all(name in plain["$defs"] for name in (ref.removeprefix("#/$defs/") for ref in references(plain)))
    for value in drawn:
        assert accepts(plain, value) == accepts(schema, value), value


NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v"],
}
INTEGER = {"type": "integer"}
# Each says that b is an integer, with a reference of another form.
FORMS = {
    "a property": {"properties": {"a": INTEGER, "b": {"$ref": "#/properties/a"}}},
    "inside a definition": {
        "$defs": {"x": {"properties": {"y": INTEGER}}},
        "properties": {"b": {"$ref": "#/$defs/x/properties/y"}},
    },
    "the older word": {"definitions": {"x": INTEGER}, "properties": {"b": {"$ref": "#/definitions/x"}}},
    "an anchor": {"$defs": {"x": {"$anchor": "n", **INTEGER}}, "properties": {"b": {"$ref": "#n"}}},
    "an anchor of an older draft": {
        "$defs": {"x": {"$id": "#n", **INTEGER}},
        "properties": {"b": {"$ref": "#n"}},
    },
    "its own id": {
        "$id": "https://e.org/s",
        "$defs": {"x": INTEGER},
        "properties": {"b": {"$ref": "https://e.org/s#/$defs/x"}},
    },
    "the id of a part": {
        "$defs": {"x": {"$id": "https://e.org/x", **INTEGER}},
        "properties": {"b": {"$ref": "https://e.org/x"}},
    },
    "an item": {"properties": {"b": {"$ref": "#/anyOf/0/items/1"}}, "anyOf": [{"items": [{}, INTEGER]}]},
    "words of another kind": {
        "components": {"schemas": {"x": INTEGER}},
        "properties": {"b": {"$ref": "#/components/schemas/x"}},
    },
    "by way of another": {
        "$defs": {"x": {"$ref": "#/$defs/y"}, "y": INTEGER},
        "properties": {"b": {"$ref": "#/$defs/x"}},
    },
    "escaped": {
        "$defs": {"a/b~c%d é": INTEGER},
        "properties": {"b": {"$ref": "#/$defs/a~1b~0c%25d%20%C3%A9"}},
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("closed", [False, True])
def test_every_form_of_reference(form, closed):
    plain = plain_schema(FORMS[form], closed=closed)
    assert accepts(plain, {"b": 1}) and not accepts(plain, {"b": "x"})


@pytest.mark.parametrize("closed", [False, True])
def test_cycles(closed):
    plain = plain_schema(NODE, closed=closed)
    assert accepts(plain, {"v": 1, "next": {"v": 2, "next": None}})
    assert not accepts(plain, {"v": 1, "next": {"next": None}})


MATCHES_A = {"patternProperties": {"a": {}}}
DEEP: dict = {}
for _ in range(MAX_DEPTH):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    "words, schema",
    [
        ("leads to no schema", {"$ref": "#/$defs/none"}),
        ("leads to no schema", {"$ref": "#none"}),
        ("leads to no schema", {"$ref": "#/properties/a/0", "properties": {"a": {"enum": [1]}}}),
        ("another document", {"$ref": "https://e.org/other"}),
        ("another document", {"$ref": "other.json#/a"}),
        ("not a string", {"$ref": 5}),
        ("an \\$id of its own", {"properties": {"a": {"$id": "https://e.org/a", "items": {"$ref": "#"}}}}),
        ("no schema", {"properties": {"a": 5}}),
        ("not an object of schemas", {"properties": 5}),
        ("cannot be held", {"properties": {"a": {"not": {"type": "string"}}}}),
        ("cannot be held", {"if": {"type": "string"}, "then": {"minLength": 3}}),
        ("uniqueItems: cannot be held", {"type": "array", "uniqueItems": True}),
        ("matches 'score'", {"properties": {"score": {}}, "patternProperties": {"^score$": {}}}),
        ("matches 'a1'", {"properties": {"b": {}, "a1": {}}, "patternProperties": {"^z": {}, "^a[0-9]": {}}}),
        ("matches 'a'", {"allOf": [{"properties": {"a": {}}}, MATCHES_A]}),
        ("matches 'a'", {"properties": {"a": {}}, "$ref": "#/$defs/x", "$defs": {"x": MATCHES_A}}),
        ("at most 32", {"patternProperties": {f"^{i}$": {} for i in range(33)}}),
        ("pattern: 5 is not a string", {"pattern": 5}),
        ("shortest text", {"items": {"pattern": "(ab){1000}{1000}"}}),
        ("shortest text", {"patternProperties": {"^a{99999}$": {}}}),
        ("multipleOf", {"multipleOf": 0}),
        ("multipleOf", {"multipleOf": True}),
        ("remainders", {"multipleOf": 999_983}),
        ("remainders", {"multipleOf": 12.345}),
        ("remainders", {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}),
        ("nested more than", DEEP),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(words, schema):
    with pytest.raises(RequestError, match=words) as refused:
        plain_schema(schema, "guided_json")
    assert refused.value.param == "guided_json" and len(refused.value.message) < 400


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i}": {} for i in range(MAX_ENTRIES)}},
        {"enum": list(range(MAX_ENTRIES + 1))},
        {"anyOf": [{"const": i} for i in range(MAX_ENTRIES)]},
        {"required": ["a"] * (MAX_ENTRIES + 1)},
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2000)} | {"2000": True},
        },
        {
            "properties": {str(i): {"allOf": [{"$ref": "#/$defs/x"}]} for i in range(500)},
            "$defs": {"x": {"properties": {str(i): {} for i in range(4000)}}},
        },
    ],
)
def test_sizes_are_bounded(schema):
    with pytest.raises(RequestError, match=r"entries|references|too large"):
        plain_schema(schema, "guided_json")


def test_what_asks_for_nothing_is_left_out():
    schema = {
        "type": "object", "title": "T", "description": "d", "$comment": "c", "default": {},
        "examples": [{"$ref": "#/no"}],
        "properties": {
            "a": {"type": "string", "format": "password"}, "b": {"type": "array", "uniqueItems": False},
            "c": {"type": "string", "format": "date"}, "title": {"type": "string"}, "d": {"enum": [{"$ref": "#/no"}]},
        },
        "propertyNames": {"type": "string"}, "dependentRequired": {}, "not": False, "then": {"type": "string"},
    }  # fmt: skip
    assert plain_schema(schema) == {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "array"},
            "c": {"type": "string", "format": "date"},
            "title": {"type": "string"},
            "d": {"enum": [{"$ref": "#/no"}]},
        },
    }


@given(st.text(max_size=12))
def test_unknown_formats_are_ignored(name):
    plain = plain_schema({"type": "string", "format": name})
    assert ("format" in plain) == (name in FORMATS)


def by_hand(schema):
    """The same, closed where an object lists its properties: of schemas without references and allOf."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    if "properties" in schema:
        made["properties"] = {key: by_hand(inner) for key, inner in schema["properties"].items()}
        made.setdefault("additionalProperties", False)
    if "items" in schema:
        made["items"] = by_hand(schema["items"])
    if "anyOf" in schema:
        made["anyOf"] = [by_hand(inner) for inner in schema["anyOf"]]
    return made


@settings(max_examples=40)
@given(trees, st.lists(values, min_size=4, max_size=8))
def test_closed_objects_have_what_they_list(schema, drawn):
    plain = plain_schema(schema, closed=True)
    for value in drawn:
        assert accepts(plain, value) == accepts(by_hand(schema), value), value


AB = {
    "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {"type": "integer"}}}],
    "$defs": {"A": {"properties": {"a": {}}}},
}
BRANCHES = {"properties": {"k": {}}, "anyOf": [{"properties": {"x": {}}}, {"properties": {"y": {}}}]}


@pytest.mark.parametrize(
    "schema, open_to, closed_to",
    [
        ({"type": "object"}, {"z": 1}, None),
        ({"properties": {}}, {}, {"z": 1}),
        ({"properties": {"a": {}}, "additionalProperties": True}, {"z": 1}, None),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, {"z": 1}, {"z": "x"}),
        ({"patternProperties": {"^x": {}}}, {"xy": 1}, {"z": 1}),
        ({"properties": {"a": {"items": {"properties": {"b": {}}}}}}, {"a": [{"b": 1}]}, {"a": [{"z": 1}]}),
        (AB, {"a": 1, "b": 2}, {"a": 1, "z": 2}),
        (AB, {}, {"b": "x"}),
        (BRANCHES, {"k": 1, "x": 1}, {"z": 1}),
        (
            {"anyOf": [{"properties": {"a": {}}, "required": ["a"]}, {"type": "null"}]},
            {"a": 1},
            {"a": 1, "z": 1},
        ),
        ({"allOf": [{"properties": {"a": {}}}, {"additionalProperties": True}]}, {"z": 1}, None),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, {"a": 1}, {"z": 1}),
        (NODE, {"v": 1, "next": {"v": 2}}, {"v": 1, "next": {"v": 2, "z": 3}}),
    ],
)
def test_what_closes(schema, open_to, closed_to):
    plain = plain_schema(schema, closed=True)
    assert accepts(plain, open_to)
    assert closed_to is None or not accepts(plain, closed_to)
    if (
        closed_to is not None
        and "additionalProperties" not in schema
        and "unevaluatedProperties" not in schema
    ):
        assert accepts(plain_schema(schema), closed_to) == accepts(schema, closed_to)
