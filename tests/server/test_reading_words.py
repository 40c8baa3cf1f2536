"""Words around calls, in every form: none is changed, and where a text is cut changes nothing.

The texts are of a grammar: words, tags and pieces of tags, fences, calls, calls that are damaged, reasoning.
"""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from afserve.server.reading.table import CHANNELS, DIALECTS, FORMS, Reading
from tests.server.rendered import read, rendered, strict_json

CALLS = [("get_time", {}), ("forecast", {"city": "Bern {B}", "days": [1, {"x": None}]})]
TYPES = {"get_time": {}, "forecast": {"city": "string", "days": "array"}, "f": {"s": "string"}}
IN_WORDS = [*FORMS, *DIALECTS, CHANNELS]
IN_WORDS.remove("list")  # a grammar's, it has no words
MARKS = sorted(
    {mark for form in FORMS.values() for mark in form.markers if len(mark) > 1}
    | {m for d in DIALECTS.values() for m in (*d.markers, d.closes, d.key, d.keyed, d.valued) if len(m) > 2}
)
MENTIONS = [
    *(
        "```",
        "```python\nprint(1)\n```",
        "\n```json\n{}\n```\n",
        "{}",
        '{"name": "f"}',
        "[",
        "]",
        ", ",
        "<",
        "< ",
    ),
    *("<|", "<｜", "</tool_call>\nok", "the tag <tool_call> is used", "<tool_call>{", "<function=f> to call"),
    *(
        'Use <tool_call> to call. e.g. {"a": 1} fine',
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
    ),
    *("<function=nobody>\n</function>", "<tool_call>nobody\n</tool_call>", '<invoke name="f"> and'),
    *("[TOOL_CALLS] marks", "see </tool_calls> here", *(f"the mark {mark} is one" for mark in MARKS)),
]
WORDS = st.lists(
    st.one_of(
        st.sampled_from(["Hi.", "é", " ", "\n", "\n\n", "  so\t", "1, 2"]),
        st.sampled_from(MENTIONS),
        st.sampled_from(MARKS).flatmap(
            lambda mark: st.integers(1, len(mark) - 1).map(lambda n: mark[:n] + " .")
        ),
    ),
    max_size=4,
).map("".join)


def no_call_in(text):
    """Whether no call of any form begins in it: marks in a row may make one."""
    return not re.search(
        r"begin[｜|]>[^|｜]*[<|｜]|\[TOOL_CALLS\]\s*[\w\[{]|(?:tool_call|ACTION)\|>\s*[\[{]", text
    )


def reading_of(form, thinks=""):
    return Reading(form, thinks=CHANNELS if form == CHANNELS else thinks, types=TYPES)


def cuts(text):
    """Every split in two, and every character by itself."""
    yield [text]
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]


@pytest.mark.parametrize("form", IN_WORDS)
@given(words=WORDS)
@settings(max_examples=40)
def test_words_without_calls_stay(form, words):
    assume(no_call_in(words))
    assert read(reading_of(form), list(words)) == (words, "", [], [])


@pytest.mark.parametrize("form", IN_WORDS)
@pytest.mark.parametrize("words", MENTIONS)
def test_every_mention_stays(form, words):
    for pieces in ([words], list(words)):
        assert read(reading_of(form), pieces) == (words, "", [], [])


@pytest.mark.parametrize("form", [form for form in IN_WORDS if form != CHANNELS])
@given(before=WORDS, between=WORDS, after=WORDS)
@settings(max_examples=25)
def test_words_around_calls_stay(form, before, between, after):
    before, between, after = (f"A{words}." if words else "" for words in (before, between, after))
    assume(all(map(no_call_in, (before, between, after))))
    first, second = (rendered(form, [call]) for call in CALLS)
    said, _, names, arguments = read(reading_of(form), list(before + first + between + second + after))
    assert said == before + between + after
    assert names == [name for name, _ in CALLS]
    assert [strict_json(text) for text in arguments] == [given for _, given in CALLS]


@pytest.mark.parametrize("form", IN_WORDS)
@pytest.mark.parametrize("space", ["", " ", "\n", "\n\n \t"])
def test_white_space_alone_is_none_of_the_words(form, space):
    text = space + space.join(rendered(form, [call]) for call in CALLS) + space
    said, _, names, _ = read(reading_of(form), list(text))
    assert (said if form != CHANNELS else said.strip(), len(names)) == ("", 2)


def test_the_line_between_words_and_calls_stays():
    call = rendered("qwen-xml", CALLS[1:])
    for pieces in cuts(f"Hi.\n{call}\nand\n{call}\nbye"):
        assert read(reading_of("qwen-xml"), pieces)[0] == "Hi.\n\nand\n\nbye"


TEXTS = st.lists(
    st.one_of(
        WORDS,
        st.sampled_from(["<think>", "</think>", "<think>\n", "\n</think>\n\n", "<answer>", "</answer>"]),
        st.sampled_from(MARKS),
        st.tuples(st.sampled_from(IN_WORDS), st.lists(st.sampled_from(CALLS), min_size=1, max_size=2)).map(
            lambda drawn: rendered(*drawn)
        ),
        st.tuples(st.sampled_from(IN_WORDS), st.integers(0, 200), st.integers(0, 30)).map(
            lambda drawn: (
                text := rendered(drawn[0], CALLS),
                text[: drawn[1]] + text[drawn[1] + drawn[2] :],
            )[1]
        ),
    ),
    max_size=4,
).map("".join)


@pytest.mark.parametrize("form", [*IN_WORDS, "list", ""])
@given(text=TEXTS, data=st.data())
@settings(max_examples=40)
def test_where_a_text_is_cut_changes_nothing(form, text, data):
    thinks = data.draw(st.sampled_from(["", "tags", "inside"]))
    whole = read(reading_of(form, thinks), [text])
    for arguments in whole[3]:
        strict_json(arguments)
    assert read(reading_of(form, thinks), list(text)) == whole
    at = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]
    assert read(reading_of(form, thinks), pieces) == whole


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("form", IN_WORDS)
@pytest.mark.parametrize("thinks", ["", "inside"])
def test_every_cut_in_two(form, thinks):
    text = ("Hm.</think>" if thinks else "") + "Hi.\n```\n" + rendered(form, CALLS) + "\n```"
    text = rendered(form, CALLS) if form == CHANNELS else text
    expected = read(reading_of(form, thinks), [text])
    assert expected[2] == ["get_time", "forecast"]
    for pieces in cuts(text):
        assert read(reading_of(form, thinks), pieces) == expected
    for end in range(len(text)):
        ended = read(reading_of(form, thinks), [text[:end]])
        assert ended == read(reading_of(form, thinks), list(text[:end]))
        for arguments in ended[3]:
            strict_json(arguments)
