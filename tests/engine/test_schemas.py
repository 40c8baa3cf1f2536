"""Answers of random weights follow drawn JSON schemas."""

import jsonschema
import pytest

from afserve.grammars.grammar import of_schema
from bench.schemas import answers, drawn, plain, rich


def valid(schema, value) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(12, marks=pytest.mark.long)])
@pytest.mark.parametrize("strategy", [plain, rich])
def test_what_ends_is_valid(strategy, count):
    found = answers(drawn(strategy(), count, 7), of_schema)
    stopped = [answer for answer in found if answer.ended == "stop"]
    assert not [answer.refused for answer in found if answer.refused]
    assert len(stopped) >= 0.75 * count, [answer.ended for answer in found]
    assert not [(a.asked, a.text) for a in stopped if not a.follows(valid)]
