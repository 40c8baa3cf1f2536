"""Calls of the Berkeley leaderboard, where `bfcl-eval` is installed: its possible answers in every form and back, and
answers of random weights that have to call its functions."""

import json
from pathlib import Path

import jsonschema
import pytest

from afserve.server.reading.table import CHANNELS, DIALECTS, FORMS, Reading
from bench.tool_calls import answered, cases, possible_calls
from tests.server.rendered import read, rendered, types_of


@pytest.fixture(scope="module")
def folder():
    return Path(pytest.importorskip("bfcl_eval").__file__).parent / "data"


@pytest.mark.parametrize("form", [*FORMS, *DIALECTS, CHANNELS])
def test_possible_answers_and_back(form, folder):
    answers = possible_calls(folder)
    assert len(answers) > 2000
    for calls in answers:
        text = rendered(form, calls)
        thinks = CHANNELS if form == CHANNELS else ""
        reading = Reading(form, thinks, types=types_of(calls))
        said, _, names, arguments = read(reading, [text[at : at + 5] for at in range(0, len(text), 5)])
        assert said == "" and names == [name for name, _ in calls], text
        assert [json.loads(text) for text in arguments] == [given for _, given in calls], text


def test_required_calls_can_be_read(folder):
    asked = cases(folder)[::80]
    found = answered(asked)
    assert not [answer.refused for answer in found if answer.refused]
    calls = [answer for answer in found if answer.ended == "stop"]
    assert len(calls) > len(asked) // 3, "most drawn words never end, but some do"
    for answer in calls:
        assert answer.calls is not None, answer.case.name
        for name, given in answer.calls:
            assert jsonschema.Draft202012Validator(answer.case.parameters[name]).is_valid(given)
