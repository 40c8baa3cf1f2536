"""Calls that are damaged, cut or oddly written: arguments are JSON of the schema's types; none swallows another."""

import pytest

from afserve.server.bodies.tools import Tools
from afserve.server.reading.kinds import ANY, OTHERS, parameter_types, typed
from afserve.server.reading.table import CHANNELS, DIALECTS, FORMS, Reading
from tests.server.rendered import read, rendered, strict_json

TEXT, NULL = {"type": "string"}, {"type": "null"}
PROPERTIES = {
    "s": TEXT,
    "i": {"type": "integer"},
    "n": {"type": "number"},
    "b": {"type": "boolean"},
    "a": {"type": "array"},
    "o": {"type": "object"},
    "si": {"type": ["string", "integer"]},
    "in": {"anyOf": [{"type": "integer"}, NULL]},
    "any": {},
}
NULLABLE = {
    "list": {"type": ["string", "null"]},
    "any_of": {"anyOf": [TEXT, NULL]},
    "one_of": {"oneOf": [NULL, {"anyOf": [TEXT]}]},
    "openapi": {**TEXT, "nullable": True},
    "enum": {"enum": ["a", None]},
    "ref": {"$ref": "#/$defs/name"},
    "all_of": {"allOf": [{"$ref": "#/$defs/any"}, {"$ref": "#/$defs/name"}]},
    "pointer": {"$ref": "#/properties/a~1b%25"},
    "a/b%": {"type": ["null", "string"]},
}
SCHEMA = {
    "type": "object",
    "properties": {**PROPERTIES, **NULLABLE},
    "$defs": {"name": {"type": ["string", "null"]}, "any": {"$ref": "#/$defs/any"}},
}
FUNCTIONS = {"f": SCHEMA, "g": {"type": "object", "properties": {}}}
TYPES = Tools(
    tuple({"type": "function", "function": {"name": n, "parameters": p}} for n, p in FUNCTIONS.items()), "auto"
).types()  # fmt: skip


def called(form, text, thinks=""):
    """Names and arguments, the words, and the same however the text is cut."""
    reading = Reading(form, thinks=CHANNELS if form == CHANNELS else thinks, types=TYPES)
    found = read(reading, [text])
    assert read(reading, list(text)) == found
    for at in range(1, len(text)):
        assert read(reading, [text[:at], text[at:]]) == found
    said, thought, names, arguments = found
    return list(zip(names, map(strict_json, arguments), strict=True)), said, thought


@pytest.mark.parametrize("key", NULLABLE)
def test_types_are_found_wherever_the_schema_has_them(key):
    assert TYPES["f"][key] == "null|string"


def test_schemas_that_cannot_be_followed_allow_anything():
    anything = "|".join(sorted(ANY))
    for schema in (
        True,
        {},
        {"$ref": "other.json"},
        {"$ref": "#/none"},
        {"type": "thing"},
        {"allOf": 3},
        {"type": []},
    ):
        assert parameter_types({"properties": {"x": schema}}) == {"x": anything}
    looped = {"properties": {"x": {"anyOf": [{"$ref": "#/properties/x"}] * 9}}}
    assert parameter_types(looped) == {"x": anything}
    others = {"additionalProperties": TEXT, "properties": {"i": {"type": "integer"}}}
    assert parameter_types(others) == {"i": "integer", OTHERS: "string"}
    reading = Reading("glm", types={"f": parameter_types(others)})
    text = rendered("glm", [("f", {"i": "1", "zip": "01234"})])
    assert read(reading, [text])[3] == ['{"i": 1, "zip": "01234"}']
    assert parameter_types({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": TEXT}}}}) == {
        "x": "string"
    }
    assert parameter_types({"allOf": [{"properties": {"x": TEXT}}, {"$ref": "#"}]}) == {"x": "string"}


@pytest.mark.parametrize(
    ("kinds", "text", "value"),
    [
        *(("string", text, text) for text in ("123", "true", "None", "none", "null", " x\n", '"x"', "['x']", "")),
        *(("null|string", text, text) for text in ("123", "True", "none", "NaN", "[1]", "1e999", "{'a': 1}", '"x"')),
        *(("null|string", text, None) for text in ("null", "None")),
        *(("boolean", text, True) for text in ("True", "true", " true\n", "TRUE", '"true"')),
        *(("integer", text, value) for text, value in (("None", None), ("007", 7), ("-5", -5), ('"5"', 5))),
        ("integer", "5.0", 5.0),
        *(("integer|null", text, None) for text in ("None", "null", "NULL", "none")),
        ("integer", str(1 << 80), 1 << 80),
        ("integer", "soon", "soon"),
        *(("integer|number", text, text) for text in ("NaN", "-Infinity", "1e999", "inf")),
        ("integer|number", "2.50", 2.5),
        ("array", "['x', (1, None)]", ["x", [1, None]]),
        ("object", "{'a': True, 'n': NaN}", {"a": True, "n": "NaN"}),
        ("object", "{'a': open('x')}", "{'a': open('x')}"),
        ("integer|string", "12", 12),
        ("integer|string", "12a", "12a"),
        ("integer|string", "True", "True"),
        *(("", text, value) for text, value in (("12", 12), ("True", True), ('"x"', "x"), ("x", "x"), ("[1", "[1"))),
    ],
)  # fmt: skip
def test_a_text_has_its_parameters_type(kinds, text, value):
    found = strict_json(typed(text, kinds))
    assert (found, type(found)) == (value, type(value))


def qwen(*parts):
    return "<tool_call>\n<function=f>\n" + "".join(parts)


GIVEN, OPEN = "<parameter=i>\n1\n</parameter>\n", '<parameter=s>\n{"a": 1}\n'
END, NEXT = "</function>\n</tool_call>", "<tool_call>\n<function=g>\n</function>\n</tool_call>"
FIRST, BOTH = ("f", {"s": '{"a": 1}'}), ("f", {"i": 1, "s": '{"a": 1}'})


@pytest.mark.parametrize(
    ("text", "calls", "said"),
    [
        (qwen(OPEN, END), [FIRST], ""),
        (qwen(OPEN, "</function>"), [FIRST], ""),
        (qwen(GIVEN, OPEN, END), [BOTH], ""),
        (qwen(OPEN, GIVEN, END), [("f", {"s": '{"a": 1}', "i": 1})], ""),
        (qwen(OPEN, END, "\n", NEXT, "\nbye"), [FIRST, ("g", {})], "\nbye"),
        (qwen(OPEN, NEXT), [FIRST, ("g", {})], ""),
        (qwen(OPEN, "</tool_call>\n", NEXT), [FIRST, ("g", {})], ""),
        (qwen(GIVEN), [("f", {"i": 1})], ""),
        (qwen(GIVEN, "</tool_call>"), [("f", {"i": 1})], ""),
        (qwen(GIVEN, "</tool_call>\n", NEXT, " ok"), [("f", {"i": 1}), ("g", {})], " ok"),
        (qwen(GIVEN, NEXT), [("f", {"i": 1}), ("g", {})], ""),
        (qwen(GIVEN, "<parameter=s>\n"), [("f", {"i": 1, "s": ""})], ""),
        (qwen(GIVEN, "<parameter=s"), [("f", {"i": 1})], ""),
        (qwen(GIVEN, "Then I wait."), [("f", {"i": 1})], "\nThen I wait."),
        (qwen("<parameter=s>\na </function> b\n</parameter>\n", END), [("f", {"s": "a </function> b"})], ""),
        (qwen("<parameter=s>\n<parameter=zz>\n</parameter>\n", END), [("f", {"s": "<parameter=zz>"})], ""),
        (qwen(END), [("f", {})], ""),
        (qwen(), [("f", {})], ""),
        ("<function=g></function> and more", [("g", {})], " and more"),
    ],
)  # fmt: skip
def test_tags_that_are_missing(text, calls, said):
    assert called("qwen-xml", text) == (calls, said, "")


def test_tags_that_are_missing_in_other_forms():
    text = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">x</invoke>\n</minimax:tool_call>'
    assert called("minimax", text) == ([("f", {"s": "x"})], "", "")
    text = "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</tool_call>\n<tool_call>g</tool_call>ok"
    assert called("glm", text) == ([("f", {"s": "x"}), ("g", {})], "ok", "")
    text = "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x\n<arg_key>i</arg_key><arg_value>1</arg_value></tool_call>"
    assert called("glm", text) == ([("f", {"s": "x", "i": 1})], "", "")


HERMES_END = "\n</tool_call>"


@pytest.mark.parametrize(
    ("inner", "given"),
    [
        ('{"name": "f"}', {}),
        *((f'{{"name": "f", "arguments": {none}}}', {}) for none in ("null", "None", '""', "{}", '"null"')),
        (r'{"name": "f", "arguments": "{\"s\": \"x\"}"}', {"s": "x"}),
        (r'{"name": "f", "arguments": "{\"s\": [\"x"}', {"s": ["x"]}),
        ('{"name": "f", "arguments": {"b": True, "n": NaN, "s": None}}', {"b": True, "n": "NaN", "s": None}),
        ("{'name': 'f', 'arguments': {'s': \"it's\"}}", {"s": "it's"}),
        ('{"name": "f", "arguments": {"s": "a\nb",}}', {"s": "a\nb"}),
        ('{"name": "f", "arguments": {"s": "x"}', {"s": "x"}),
        ('{"name": "f", "arguments": {"a": [1, 2}}', {"a": [1, 2]}),
        ('{"name": "f", "arguments": {"i": 1}}}', {"i": 1}),
        ('{"name": "f", "arguments": {"i": 1}} }]\n', {"i": 1}),
        ('{"name": "f", "arguments": {"i": 1, "s": tomorrow}}', {"i": 1, "s": None}),
        ('{"arguments": {"i": 9007199254740993}, "name": "f"}', {"i": 9007199254740993}),
        ('{"name": "f", "arguments": {"s": "</tool_call>"}}', {"s": "</tool_call>"}),
        (r'{"name": "f", "arguments": "\ud800"}', "\ufffd"),
    ],
)
def test_objects_as_models_write_them(inner, given):
    text = f'Hi.<tool_call>\n{inner}{HERMES_END}\n<tool_call>\n{{"name": "g"}}{HERMES_END}\nbye'
    assert called("hermes", text) == ([("f", given), ("g", {})], "Hi.\nbye", "")


KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI += "<|tool_calls_section_end|>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
V3, V31 = (
    DEEPSEEK.format(call) for call in ("function<｜tool▁sep｜>f\n```json\n%s\n```", "f<｜tool▁sep｜>%s")
)
MISTRAL = ("[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]{}", '[TOOL_CALLS] [{"name": "f"}]')


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *(("kimi", KIMI.replace("{}", none)) for none in ("", " ", "null", "{}")),
        *(("deepseek", text % none) for text in (V3, V31) for none in ("", "null", "{}")),
        ("deepseek", DEEPSEEK.format("function<｜tool▁sep｜>f%s") % "{}"),
        ("deepseek", DEEPSEEK.format("f<｜tool▁sep｜>```json\n%s\n```") % "{}"),
        *(("mistral", text) for text in MISTRAL),
        ("channels", "<|channel|>commentary to=functions.f<|message|><|call|>"),
        ("hunyuan", '<tool_calls>[{"name": "f"}]</tool_calls>'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": null}]'),
        ("qwen-xml", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        ("minimax", '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>'),
        ("glm", "<tool_call>f\n</tool_call>"),
        (
            "hy3",
            "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        ),
        ("gemma", "<|tool_call>call:f{}<tool_call|>"),
        ("lfm2", "<|tool_call_start|>[f()]<|tool_call_end|>"),
        ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]<|END_ACTION|>'),
    ],
)  # fmt: skip
def test_no_arguments_are_an_empty_object(form, text):
    assert called(form, text) == ([("f", {})], "", "")


@pytest.mark.parametrize("form", ["kimi", "deepseek", "mistral", "granite", "cohere", "gemma", "lfm2"])
@pytest.mark.parametrize("thinks", ["inside", "tags"])
def test_special_tokens_end_reasoning(form, thinks):
    calls = [("f", {"s": "a </think> b"}), ("g", {})]
    lead = "<think>" if thinks == "tags" else ""
    found = called(form, f"{lead}I should\ncall.\n{rendered(form, calls)}ok", thinks)
    assert found == (calls, "ok", "I should\ncall.\n")
    mention = f"the mark {FORMS[form].opens[0]} is one"
    assert called(form, f"{lead}{mention}</think>ok", thinks) == ([], "ok", mention)


@pytest.mark.parametrize("form", ["hermes", "hunyuan", *DIALECTS])
def test_words_of_reasoning_may_look_like_calls(form):
    thought = f"I could write {rendered(form, [('g', {})])} here"
    assert called(form, f"{thought}</think>ok", "inside") == ([], "ok", thought)


@pytest.mark.parametrize("thinks", ["inside", "tags"])
def test_a_tag_that_is_repeated_is_none_of_the_reasoning(thinks):
    lead = "<think>" if thinks == "tags" else ""
    for again in ("<think>\n", "\n<think>", " <think>\n\n"):
        assert called("hermes", f"{lead}{again}hm <think> hm</think>ok", thinks) == (
            [],
            "ok",
            "hm <think> hm",
        )
    assert called("hermes", f"{lead}<think>", thinks)[2] == ""


@pytest.mark.parametrize("form", [*FORMS, *DIALECTS, CHANNELS])
def test_an_answer_that_was_cut_leaves_its_arguments_open(form):
    """Nobody runs half a command: arguments that are JSON are whole."""
    given = {"s": "rm -rf build", "i": 12}
    text = rendered(form, [("f", given)])
    for end in range(len(text)):
        reader = Reading(form, thinks=CHANNELS if form == CHANNELS else "", types=TYPES).reader()
        parts = reader.read_text(text[:end]) + reader.end_text(cut=True)
        arguments = "".join(part.text for part in parts if type(part).__name__ == "Argued")
        if any(type(part).__name__ == "Called" for part in parts):
            assert arguments
            try:
                found = strict_json(arguments)
            except ValueError:
                continue
            assert found == given
