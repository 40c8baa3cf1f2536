"""JSON and Python's literals as JSON text: against `json` and `ast`, cut anywhere; every text ends as JSON."""

import ast
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.server.reading.call_object import ArgumentsWriter, CallObject
from afserve.server.reading.literal import MOST_DEPTH, LiteralWriter, json_literal
from tests.server.rendered import strict_json

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 80), 1 << 80),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
PIECES = st.lists(
    st.one_of(
        st.sampled_from([*"{}[]()\"',:\\ -.+0123eE", "True", "None", "nul", "NaN", "1e999", "\\u12", "\n"]),
        st.text(max_size=3),
    ),
    max_size=20,
)


def written(writer, pieces):
    """What it says of text in pieces, closed at the end, and what it leaves."""
    said, left = "", ""
    for piece in pieces:
        more, rest = ("", piece) if writer.done else writer.write_text(piece)
        said, left = said + more, left + rest
    return said + writer.close_text(), left


@given(VALUES, st.sampled_from([None, 0, 2]), st.booleans())
def test_json_passes_as_it_is_written(value, indent, ascii_):
    text = json.dumps(value, ensure_ascii=ascii_, indent=indent)
    assert json_literal(f" {text}\n") == text
    assert written(LiteralWriter(), text) == (text, "")


@given(VALUES)
def test_what_python_prints_is_read(value):
    text = repr(value)
    assert ast.literal_eval(text) == value
    found = json_literal(text)
    assert found is not None and strict_json(found) == value


@pytest.mark.parametrize(
    ("text", "json_"),
    [
        ("('x', 1,)", '["x", 1]'),
        ("{'a': True, \"b\": None,}", '{"a": true, "b": null}'),
        ("{1: 2}", '{"1": 2}'),
        ("'it\\'s \"x\"'", '"it\'s \\"x\\""'),
        ("'\\x41\\d'", '"A\\\\d"'),
        ('"a\nb"', '"a\\nb"'),
        ("[.5, 5., +5, -.5e3]", "[0.5, 5.0, 5, -0.5e3]"),
        ("NaN", '"NaN"'),
        (
            "[-Infinity, 1e999, -1e999, 9007199254740993]",
            '["-Infinity", "1e999", "-1e999", 9007199254740993]',
        ),
    ],
)
def test_what_json_does_not_know_becomes_json(text, json_):
    assert json_literal(text) == json_


@pytest.mark.parametrize(
    "text",
    [
        *("", "abc", "[a, b]", "007", "1_000", "0x10", "[1 2]", "{'a'}", "[1}", "{]", "1 2", '"a" "b"', "'a", "{"),
        *("tru", "--1", "[" * 100_000, "{'a':" * 100_000, "(" * (MOST_DEPTH + 1) + ")" * (MOST_DEPTH + 1)),
    ],
)  # fmt: skip
def test_other_words_are_no_literal(text):
    assert json_literal(text) is None


@given(PIECES)
def test_every_text_ends_as_json_however_it_is_cut(pieces):
    for make in (LiteralWriter, ArgumentsWriter):
        said, left = written(make(), pieces)
        strict_json(said)
        assert written(make(), "".join(pieces)) == (said, left)


@given(PIECES)
def test_arguments_of_an_object_are_json(pieces):
    def read(pieces):
        call = CallObject()
        told, rest = "", ""
        for piece in ['{"name": "f", "arguments": ', *pieces]:
            more, left = ("", piece) if call.done else call.write_text(piece)
            told, rest = told + more, rest + left
        return call.name, told + ("" if call.done else call.close_text()), rest

    found = read(pieces)
    assert found == read(["".join(pieces)]) and found[0] == "f"
    strict_json(found[1])


@pytest.mark.parametrize("depth", [MOST_DEPTH - 1, MOST_DEPTH + 1, 50_000])
def test_depth_is_bounded(depth):
    said, _ = written(LiteralWriter(), ['{"a":' * depth, "1"])
    assert said.count("{") == said.count("}") == min(depth, MOST_DEPTH)


def test_digits_go_out_as_they_come():
    writer = LiteralWriter()
    assert (
        writer.write_text("[12")[0] == "[12"
        and writer.write_text("3.")[0] == "3"
        and writer.write_text("5 ")[0] == ".5 "
    )
    assert math.isinf(json.loads(written(LiteralWriter(), "[1e999]")[0])[0])  # JSON has no greatest number
