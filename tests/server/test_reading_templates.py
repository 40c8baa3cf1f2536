"""Each family's template writes a conversation with calls; read back, its last turn has the same names, arguments,
reasoning and words. Sent back by a client, it is rendered the same."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from afserve.server.bodies.fields import Fields
from afserve.server.bodies.openai import chat_request
from afserve.server.reading.parts import Argued, Called
from afserve.server.replies.chat_reply import ReadChoice
from afserve.server.replies.choice import TextPiece
from afserve.server.text.conversation import Conversation
from afserve.tokens.chat_template import ChatTemplate
from afserve.tokens.tokenizer import Tokenizer
from tests.server.family_templates import FAMILIES
from tests.server.nano import FOLDER
from tests.server.rendered import read, strict_json

USER = {"role": "user", "content": "What now?"}
NULL = {"type": "null"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, NULL]},
        "either": {"type": ["string", "null"]},
        "named": {"$ref": "#/$defs/name"},
        "deep": {"allOf": [{"oneOf": [{"$ref": "#/$defs/name"}, {"const": None}]}]},
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "flag": {"type": ["boolean", "null"]},
        "list": {"type": "array", "items": {"type": "string"}},
        "object": {"type": "object"},
        "pick": {"enum": ["1", "2", "true"]},
    },
    "$defs": {"name": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in {"f": PARAMETERS, "get.time-2": {"type": "object"}}.items()
]
TEXTS = st.one_of(
    st.sampled_from(
        ["", "123", "True", "none", "1e999", "[1]", "{'a': 1}", '"x"', " a\n\n b ", "</function>"]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="<｜["), max_size=10),
)
# What a template that prints values shows as another value: a text like "None", where null is allowed.
PLAIN = TEXTS.filter(lambda text: text.strip() not in ("None", "null"))
OR_NULL = st.one_of(st.none(), PLAIN)
VALUES = {
    **dict.fromkeys(("text", "named"), TEXTS),
    **dict.fromkeys(("maybe", "either", "deep"), OR_NULL),
    "count": st.integers(-(1 << 70), 1 << 70),
    "size": st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    "flag": st.one_of(st.none(), st.booleans()),
    "list": st.lists(TEXTS, max_size=2),
    "object": st.dictionaries(TEXTS, st.one_of(OR_NULL, st.booleans(), st.integers()), max_size=2),
    "pick": st.sampled_from(["1", "2", "true"]),
}
CALLS = st.lists(
    st.one_of(
        st.fixed_dictionaries({}, optional=VALUES).map(lambda given: ("f", given)),
        st.just(("get.time-2", {})),
    ),
    min_size=1,
    max_size=3,
)
THOUGHTS = st.sampled_from(["", "Hm.", "Hm.\n\n<tool_call> or so?"])
WORDS = st.sampled_from(["", "I look.", "Here:\n```json\n{}\n```", "a < b, see [1] and {x}."])


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(FOLDER)


def as_told(form, value):
    """What a template can tell: LFM2's writes texts between quotes as they are, Gemma's names of values without."""
    if isinstance(value, dict):
        plain = form == "gemma" and not value.keys() <= VALUES.keys()
        return {(f"k{at}" if plain else key): as_told(form, x) for at, (key, x) in enumerate(value.items())}
    if isinstance(value, list):
        return [as_told(form, x) for x in value]
    return re.sub(r"['\\]", "", value) if form == "lfm2" and isinstance(value, str) else value


def turn_of(content, calls, reasoning=""):
    made = [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for at, (name, given) in enumerate(calls)
    ]
    turn = {"role": "assistant", "content": content or None, "tool_calls": made}
    return {**turn, "reasoning_content": reasoning} if reasoning else turn


def written(conversation, messages):
    """(The prompt before the last message, what the template writes of it.)"""
    asked = chat_request(Fields({"messages": messages[:-1], "tools": TOOLS}))
    prompt = conversation.render(asked)
    whole = conversation.render(
        chat_request(Fields({"messages": messages, "tools": TOOLS, "add_generation_prompt": False}))
    )
    assert whole.startswith(prompt)
    return asked, prompt, whole[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
@given(content=WORDS, calls=CALLS, thought=THOUGHTS, step=st.integers(1, 30))
@settings(max_examples=40)
def test_a_turn_is_read_back(family, tokenizer, content, calls, thought, step):
    source, form, end, space = FAMILIES[family]
    content = "" if form == "cohere" else content  # its template writes no words beside calls
    calls = [(name, as_told(form, given)) for name, given in calls]
    conversation = Conversation(ChatTemplate(source, {}), tokenizer)
    thought = thought if "reasoning_content" in source else ""
    asked, prompt, turn = written(conversation, [USER, turn_of(content, calls, thought)])
    turn = turn.removesuffix(end)
    reading = conversation.reading(asked, prompt)
    assert reading is not None and reading.calls == form
    said, thoughts, names, arguments = read(reading, [turn[i : i + step] for i in range(0, len(turn), step)])
    assert names == [name for name, _ in calls]
    assert [strict_json(text) for text in arguments] == [given for _, given in calls]
    assert said == (content + space if content else "") and thoughts.strip() == thought


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_writes_the_same(family, tokenizer):
    """Arguments as an object or as a text, whichever the template adds to its words."""
    source = FAMILIES[family][0]
    messages = [USER, turn_of("I look.", [("f", {"text": "x"}), ("get.time-2", {})])]
    for call in messages[1]["tool_calls"]:
        call["id"] = f"functions.{call['function']['name']}:0" if "kimi" in family else "abcdefgh1"
    conversation = Conversation(ChatTemplate(source, {}), tokenizer)
    asked = chat_request(Fields({"messages": messages, "tools": TOOLS, "add_generation_prompt": False}))
    if "arguments + " not in source:
        for call in messages[1]["tool_calls"]:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    theirs, _ = render_jinja_template(conversations=[messages], tools=TOOLS, chat_template=source)
    assert conversation.render(asked) == theirs[0]


def test_words_of_command_a_plus(tokenizer):
    """In tags of their own behind the reasoning, which the prompt begins."""
    conversation = Conversation(ChatTemplate(FAMILIES["command-a-plus"][0], {}), tokenizer)
    answer = {"role": "assistant", "content": "Yes < no.", "reasoning_content": "Hm."}
    asked, prompt, turn = written(conversation, [USER, answer])
    turn = turn.removesuffix("<|END_OF_TURN_TOKEN|>")
    for pieces in ([turn], list(turn)):
        assert read(conversation.reading(asked, prompt), pieces) == ("Yes < no.", "Hm.", [], [])


@pytest.mark.parametrize("family", ["kimi-k2", "mistral", "mistral-v11"])
def test_ids_have_the_models_shape_when_they_are_sent_back(family, tokenizer):
    """The model reads what it wrote, whatever a client makes of the ids in between."""
    source, _, end, _ = FAMILIES[family]
    conversation = Conversation(ChatTemplate(source, {}), tokenizer)
    messages = [USER]
    for turn in range(3):
        calls = [("f", {"text": str(turn)}), ("get.time-2", {})]
        answer = turn_of("", calls)
        asked, prompt, text = written(conversation, [*messages, answer])
        told = ReadChoice(conversation.reading(asked, prompt), f"n{turn}")
        parts = told.read_piece(TextPiece(text.removesuffix(end), 1, (), "stop"))
        ids = [told.call_id(part.index) for part in parts if isinstance(part, Called)]
        if family == "kimi-k2":
            assert ids == [f"functions.f:{2 * turn}", f"functions.get.time-2:{2 * turn + 1}"]
        assert len(set(ids)) == 2 and all(id_ in text for id_ in ids) == (family == "kimi-k2")
        for own in (ids, [f"toolu_{turn}a", f"toolu_{turn}b"]):
            sent = [{**call, "id": id_} for call, id_ in zip(answer["tool_calls"], own, strict=True)]
            results = [{"role": "tool", "tool_call_id": id_, "content": "noon"} for id_ in own]
            after = [*messages, {**answer, "tool_calls": sent}, *results, USER]
            again = conversation.render(chat_request(Fields({"messages": after, "tools": TOOLS})))
            assert again.startswith(prompt) and "toolu" not in again
            if family == "kimi-k2":
                assert text in again and all(f"## Return of {id_}" in again for id_ in ids)
        messages = after
    assert any(isinstance(part, Argued) for part in parts)
