"""Answers read as words, reasoning and calls: every form, cut anywhere, and no text that raises."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.server.reading.parts import Argued, Called, Said, Thought
from afserve.server.reading.table import FORMS, Reading, calls_of, thinks

FORECAST, TIME = {"city": 'Bern "B" }', "days": [1, {"x": None}]}, {}
A, B = json.dumps(FORECAST), json.dumps(TIME)
TWO_CALLS = {
    "hermes": f'<tool_call>\n{{"name": "forecast", "arguments": {A}}}\n</tool_call>\n'
    f'<tool_call>\n{{"arguments": {B}, "name": "time"}}\n</tool_call>',
    "mistral": f'[TOOL_CALLS][{{"name": "forecast", "arguments": {A}}}, {{"name": "time", "arguments": {B}}}]',
    "list": f'[{{"name": "forecast", "parameters": {A}}}, {{"name": "time", "parameters": {B}}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n```json\n"
    f"{A}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>time<｜tool▁sep｜>{B}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.forecast:0<|tool_call_argument_begin|>"
    f"{A}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{B}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "xml": "<tool_call>\n<function=forecast>\n<parameter=city>\n" + FORECAST["city"] + "\n</parameter>\n"
    '<parameter=days>\n[1, {"x": null}]\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=time>\n</function>\n</tool_call>",
}
PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "{",
    "}",
    '"',
    "[",
    "]",
    ",",
    "\\",
    "name",
    "arguments",
    ": ",
    " ",
    "\n",
]
PIECES += [marker for form in FORMS.values() for marker in form.markers]
PIECES += [
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    ">",
    '{"name": "f", "arguments": {',
    "é",
]


def read(reading, pieces):
    reader = reading.reader()
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
    said = "".join(p.text for p in parts if isinstance(p, Said))
    thought = "".join(p.text for p in parts if isinstance(p, Thought))
    names = [p.name for p in parts if isinstance(p, Called)]
    arguments = [
        "".join(p.text for p in parts if isinstance(p, Argued) and p.index == i) for i in range(len(names))
    ]
    return said, thought, names, arguments


@pytest.mark.parametrize("form", TWO_CALLS)
@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_two_calls(form, step):
    text = TWO_CALLS[form]
    types = {"forecast": {"city": "string", "days": "array"}}
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    said, _, names, arguments = read(Reading(form, types=types), pieces)
    assert said == "" and names == ["forecast", "time"]
    assert [json.loads(text) for text in arguments] == [FORECAST, TIME]


def test_arguments_come_as_they_are_written():
    reader = Reading("hermes").reader()
    assert reader.feed('<tool_call>{"name": "f", "arg') == [Called(0, "f")]
    assert reader.feed('uments": {"a": [1') == [Argued(0, '{"a": [1')]
    assert reader.feed("]}}") == [Argued(0, "]}")]


@pytest.mark.parametrize(
    "text", ["a < b", "a <tool_call> b", "<tool_call>{", '<tool_call>{"x": 1}', "<tool_"]
)
def test_what_is_no_call_is_text(text):
    assert read(Reading("hermes"), list(text)) == (text, "", [], [])


@pytest.mark.parametrize(
    "thinks_, text",
    [("tags", "<think>\nhm</think>\n\nyes"), ("inside", "hm</think>yes"), ("tags", " <think>hm</think>yes")],
)
def test_reasoning_is_told_from_the_answer(thinks_, text):
    assert read(Reading(thinks=thinks_), list(text)) == ("yes", "hm", [], [])


def test_an_answer_without_reasoning_is_an_answer():
    assert read(Reading(thinks="tags"), list("the <think> tag")) == ("the <think> tag", "", [], [])
    assert read(Reading(thinks="inside"), list("no end </thi")) == ("", "no end </thi", [], [])


@pytest.mark.parametrize("form", [*FORMS, "xml", ""])
@given(pieces=st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=30), data=st.data())
def test_no_text_raises_and_cuts_change_nothing(form, pieces, data):
    reading = Reading(form, data.draw(st.sampled_from(["", "tags", "inside"])))
    assert read(reading, pieces) == read(reading, ["".join(pieces)])


def test_the_template_tells_the_form():
    assert calls_of("{{ '<｜tool▁call▁begin｜>' }}") == "deepseek"
    assert calls_of("<tool_call>\n<function=f>") == "xml"
    assert calls_of("{{ messages }}") == "hermes"
    assert thinks("x.split('</think>')") and not thinks("x")
