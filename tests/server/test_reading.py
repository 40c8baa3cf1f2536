"""Answers read as words, reasoning and calls: every form, cut anywhere, and no text that raises."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.server.reading.parts import Argued, Called
from afserve.server.reading.reasoning import ANSWERS, THOUGHTS
from afserve.server.reading.table import CHANNELS, DIALECTS, FORMS, Reading, calls_of, thinks
from tests.server.rendered import read, rendered, types_of

FORECAST, TIME = {"city": 'Bern "B" }', "days": [1, {"x": None}]}, {}
CALLS = [("forecast", FORECAST), ("time", TIME)]
ALL = [*FORMS, *DIALECTS, CHANNELS]
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
    *(
        m
        for d in DIALECTS.values()
        for m in (*d.markers, d.named, d.closes, d.key, d.keyed, d.value, d.valued)
    ),
    *("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "analysis", " to=functions.f "),
    *(mark for tags in (*ANSWERS, *THOUGHTS) for mark in (tags.opens, tags.closes)),
    *('<|"|>', "call:f{", "[f(", "a=", ")"),
    "é",
]


def reading_of(form, calls):
    return Reading(form, thinks=CHANNELS if form == CHANNELS else "", types=types_of(calls))


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_two_calls(form, step):
    text = rendered(form, CALLS)
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    said, _, names, arguments = read(reading_of(form, CALLS), pieces)
    assert said == "" and names == ["forecast", "time"]
    assert [json.loads(text) for text in arguments] == [FORECAST, TIME]


KEYS = st.text("abc_xyz", min_size=1, max_size=6)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>\n"), max_size=12)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), WORDS
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)


@pytest.mark.parametrize("form", ALL)
@given(
    calls=st.lists(
        st.tuples(
            st.from_regex("[a-z][a-z_.]{0,8}[a-z]", fullmatch=True), st.dictionaries(KEYS, VALUES, max_size=3)
        ),
        min_size=1,
        max_size=3,
        unique_by=lambda call: call[0],
    ),
    step=st.integers(1, 40),
)
def test_any_calls_and_back(form, calls, step):
    text = rendered(form, calls)
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    said, _, names, arguments = read(reading_of(form, calls), pieces)
    assert said == "" and names == [name for name, _ in calls]
    assert [json.loads(text) for text in arguments] == [given for _, given in calls]


def test_other_ways_to_write_a_call():
    given = json.dumps(FORECAST)
    text = f'<tool_call>{{"arguments": {given}, "name": "forecast"}}</tool_call>'
    assert read(Reading("hermes"), list(text)) == ("", "", ["forecast"], [given])
    text = f"<｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{given}<｜tool▁call▁end｜>"
    assert read(Reading("deepseek"), list(text)) == ("", "", ["forecast"], [given])
    text = f"<|start|>assistant to=functions.forecast<|channel|>commentary json<|message|>{given}<|call|>"
    assert read(Reading(CHANNELS, CHANNELS), list(text)) == ("", "", ["forecast"], [given])


CHANNELLED = (
    "<|channel|>analysis<|message|>hm <|end|><|start|>assistant<|channel|>commentary<|message|>I look. <|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
)


def test_channels():
    assert read(Reading(thinks=CHANNELS), list(CHANNELLED)) == ("I look. Yes.", "hm ", [], [])
    assert read(Reading(thinks=CHANNELS), ["Just words"]) == ("Just words", "", [], [])
    call = rendered(CHANNELS, [("time", {})])
    both = CHANNELLED.replace("<|return|>", "<|end|><|start|>assistant") + call
    assert read(Reading(CHANNELS, CHANNELS), list(both)) == ("I look. Yes.", "hm ", ["time"], ["{}"])
    assert read(Reading("", CHANNELS), list(call)) == ("{}", "", [], [])
    cut = "<|channel|>commentary to=functions.time<|message|>"
    assert read(Reading(CHANNELS, CHANNELS), [cut]) == ("", "", ["time"], ["{}"])
    assert read(Reading(thinks=CHANNELS), ["<|channel|>" + "x" * 600])[0] == "<|channel|>" + "x" * 600


def test_an_answer_in_tags():
    reading = Reading(thinks="tags", wrapped=ANSWERS[0])
    text = "<think>\nhm\n</think>\n<answer>\nYes,\n</b> it is.\n</answer>"
    assert read(reading, list(text)) == ("Yes,\n</b> it is.", "hm\n", [], [])
    assert read(reading, list("No tags.\n"))[0] == "No tags.\n"
    assert read(reading, list("<answer>a</answer> b</answer>\n"))[0] == "a</answer> b"


def test_arguments_come_as_they_are_written():
    reader = Reading("hermes").reader()
    assert reader.read_text('<tool_call>{"name": "f", "arg') == [Called(0, "f")]
    assert reader.read_text('uments": {"a": [1') == [Argued(0, '{"a": [1')]
    assert reader.read_text("]}}") == [Argued(0, "]}")]


def test_a_text_in_marks_of_its_own_is_any_text():
    """Gemma 4 writes no backslash in front of anything, and names without marks."""
    text = '<|tool_call>call:f{a:<|"|>"x" \\ {<|"|>,b-c:[1,<|"|><|"|>],d:{e:True}}<tool_call|> ok'
    for pieces in ([text], list(text)):
        said, _, names, arguments = read(Reading("gemma"), pieces)
        assert (said, names) == (" ok", ["f"])
        assert json.loads(arguments[0]) == {"a": '"x" \\ {', "b-c": [1, ""], "d": {"e": True}}


def test_calls_of_python():
    text = """<|tool_call_start|>[f(a='it\\'s', b="x", c=-1.5, d=(1, None,), e={'k': [True]}), g( ), h(x=1"""
    expected = [{"a": "it's", "b": "x", "c": -1.5, "d": [1, None], "e": {"k": [True]}}, {}, {"x": 1}]
    for pieces in ([text], list(text)):
        said, _, names, arguments = read(Reading("lfm2"), pieces)
        assert (said, names) == ("", ["f", "g", "h"]) and list(map(json.loads, arguments)) == expected
    for odd in ("f", "[f", "[f]", "[f(a=1"):
        said, _, names, _ = read(Reading("lfm2"), list(f"<|tool_call_start|>{odd}"))
        assert (said, names) == (("", ["f"]) if "(" in odd else (f"<|tool_call_start|>{odd}", []))
    reader = Reading("lfm2").reader()
    assert reader.read_text("<|tool_call_start|>[f(a=[1") == [Called(0, "f"), Argued(0, '{"a": [1')]


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


@pytest.mark.parametrize("form", [*ALL, ""])
@given(pieces=st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=30), data=st.data())
def test_no_text_raises_and_cuts_change_nothing(form, pieces, data):
    thinks_ = data.draw(st.sampled_from(["", "tags", "inside", CHANNELS]))
    reading = Reading(form, thinks_, wrapped=data.draw(st.sampled_from([None, *ANSWERS])))
    assert read(reading, pieces) == read(reading, ["".join(pieces)])


def test_the_template_tells_the_form():
    assert calls_of("{{ '<｜tool▁call▁begin｜>' }}") == "deepseek"
    assert calls_of("<tool_call>\n<function=f>\n<parameter=x>") == "qwen-xml"
    assert calls_of("<tool_call>f\n<arg_key>") == "glm" and calls_of("<tool_calls>[") == "hunyuan"
    assert calls_of('<invoke name="f">\n<parameter name="x">') == "minimax"
    assert calls_of("<|tool_call|>[") == "granite" and calls_of("<|channel|>") == CHANNELS
    assert thinks("<|channel|>analysis")
    assert calls_of("'<|tool_call>call:'") == "gemma" and calls_of("<|START_ACTION|>[") == "cohere"
    assert calls_of("{{ messages }}") == "hermes"
    assert calls_of("{{ messages }}", lambda mark: mark == "<|tool_call_start|>") == "lfm2"
    assert thinks("x.split('</think>')") and not thinks("x")
