"""Grammars that take too much are refused before a request is taken; those that are taken are followed to their end.

What is too much is counted in the compiler's units of work: no clock is asked here or there.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from afserve.errors import RequestError
from afserve.grammars.grammar import (
    MAX_RULES,
    Compiler,
    of_choice,
    of_lark,
    of_regex,
    of_schema,
)
from afserve.grammars.grammar_trial import in_words

NANO = Path("configs/nano")
VOCABULARY, END = 2048, 2
# The words that belong to the compiler and to Python, never to a client.
INNER = (
    "fuel",
    "lexer_",
    "definitive",
    "recursion depth",
    "ff_tokens",
    "<state>",
    "max is",
    "Some(",
    "panic",
    "NoExtension",
)
EXPLOSIVE = [
    ".*" * 200, ".*" * 400, "(a?){3000}a{3000}", "(a?){500}a{500}", "a{1000}{1000}", "a{1000}{997}", "(ab){1000}{1000}",
    "a{1,1000}{1,1000}", "(a{0,100}){0,100}", "(((a{1,20}){1,20}){1,20}){1,20}", "(a|aa){500}", "(a|aa|aaa){300}",
    "a{1000000}", r"\p{L}{1000}{100}", "(.{0,50}x){50}",
    "[^\"]*" * 200, r"(\w{0,30} ?){200}", ".{0,1000}{0,1000}", "(" * 300 + "a" + ")" * 300,
    "a?" * 600 + "a" * 600,
]  # fmt: skip
# Some of these are taken and some are not; what is taken must be followed.
BETWEEN = [
    r"\d{0,300}\d{0,300}\d{0,300}", "(x{0,40}){40}y", "(.*){1,32000}[bc]", ".*" * 60, ".*" * 100, ".*" * 150,
    "(.{0,50}x){10}", "(.{0,50}x){25}", r"(\w{0,9} ?){20}", r"(\w{0,20} ?){60}", "(a?){100}a{100}", "(a|aa){100}",
    "(a|aa){300}", "((a{0,9}){0,9}){0,9}", "(a?b?c?d?){500}", "([a-z]+ ?){500}", "(.?){1000}", "(a.{0,20}){30}",
    r"(\p{L}{0,20}\p{N}{0,20}){20}", "(foo|foobar|bar){1,400}", "((a|b)?){2000}", "(a*){1000}b", "(.{1,100}\n){100}",
]  # fmt: skip
ORDINARY = [
    "a", "[0-9]{4}-[0-9]{2}-[0-9]{2}", r"[\w.+-]+@[\w-]+\.[\w.-]+", r"https?://[^\s]{1,2048}", "[a-f0-9]{64}",
    ".{1,500}", r"(?:[^\"\\]|\\.)*", "(a|b)*a(a|b){20}", r"(\w+\s){50}", "([a-z]+)*", "(a+)+$", "(x+x+)+y", "(.*a){25}",
    r"(\+?\d{1,3}[ -]?)?(\(\d{1,4}\)[ -]?)?\d{1,4}([ -]?\d{1,4}){1,4}", r"\p{Lu}\p{Ll}{0,50}( \p{Lu}\p{Ll}{0,50}){0,5}",
    "[a-z]{1,100000}", "(.|\n){0,10000}", "|".join(f"w{i}" for i in range(3000)), "a" * 16_000,
]  # fmt: skip
NOT_FOLLOWED = [
    'root ::= "a" root', "root ::= " + " ".join(['("a"|"aa")*'] * 200), 'start: "a" start', "start: a\na: b\nb: a",
    "start: " + "(" * 200 + '"a"' + ")" * 200, "root ::= " + "(" * 3000 + '"a"', "start: nothing",
    "start: " + "".join(f"r{i}\nr{i}: \"a\" " for i in range(MAX_RULES)) + '"b"', 'start: "' + "a" * 40_000 + '"',
    "start: /[^\\s\\S]/", "start: /(a|aa){500}/",
]  # fmt: skip


@pytest.fixture(scope="module")
def compiler():
    return Compiler(NANO, VOCABULARY, (END,))


def check(compiler, made):
    """The refusal, None for a grammar that is taken."""
    try:
        compiler.check(made("the_field"), "the_field")
    except RequestError as error:
        return error
    return None


def told_well(error):
    return (
        error is not None
        and error.param == "the_field"
        and len(error.message) < 500
        and not any(word in error.message for word in INNER)
    )


@pytest.mark.parametrize("pattern", EXPLOSIVE, ids=range(len(EXPLOSIVE)))
def test_explosive_patterns_are_refused_with_their_field(compiler, pattern):
    assert told_well(check(compiler, lambda param: of_regex(pattern, param)))


@pytest.mark.parametrize("pattern", EXPLOSIVE[:12], ids=range(12))
def test_so_are_those_inside_a_schema_or_a_grammar(compiler, pattern):
    keys = {"type": "object", "patternProperties": {f"^{pattern}$": {}}, "additionalProperties": False}
    for schema in ({"type": "string", "pattern": f"^({pattern})$"}, keys):
        assert told_well(check(compiler, lambda param, schema=schema: of_schema(schema, param)))


def follows_to_its_end(compiler, grammar, seed):
    """A random answer of 120 tokens, as an engine follows it."""
    matcher, draws, last = compiler.compile(grammar), random.Random(seed), -1
    for _ in range(120):
        ids = np.flatnonzero(np.unpackbits(matcher.allowed_B(), count=VOCABULARY, bitorder="little"))
        ids = ids[ids != END]
        if matcher.is_complete or not len(ids):
            return
        if seed % 2 == 0 or last not in ids:
            last = int(ids[draws.randrange(len(ids))])
        matcher.consume([last])


@pytest.mark.parametrize("pattern", ORDINARY, ids=range(len(ORDINARY)))
def test_ordinary_patterns_are_taken_and_followed(compiler, pattern):
    grammar = of_regex(pattern)
    compiler.check(grammar, "guided_regex")
    if len(pattern) < 10_000:
        for seed in range(3):
            follows_to_its_end(compiler, grammar, seed)


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("pattern", BETWEEN, ids=range(len(BETWEEN)))
def test_what_is_taken_is_followed(compiler, pattern):
    for made in (
        of_regex,
        lambda text, param: of_schema({"type": "string", "pattern": f"^({text})$"}, param),
    ):
        error = check(compiler, lambda param, made=made: made(pattern, param))
        assert error is None or told_well(error)
        for seed in range(0 if error else 2):
            follows_to_its_end(compiler, made(pattern, "the_field"), seed)


@pytest.mark.parametrize("grammar", NOT_FOLLOWED, ids=range(len(NOT_FOLLOWED)))
def test_grammars_that_cannot_be_followed(compiler, grammar):
    assert told_well(check(compiler, lambda param: of_lark(grammar, param)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}},
        {"const": "x" * 40_000},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"type": "object", "patternProperties": {"^a": {}, "b$": {}}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "number", "minimum": 0.1234567890123456, "maximum": 1e300},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "strange"},
        {"required": 5},
        {"pattern": "("},
        {"pattern": "(?=a)b"},
        {"pattern": r"(a)\1"},
        {"const": "\ud800"},
        {"properties": {"\udc00": {}}},
        False,
    ],
)
def test_schemas_that_cannot_be_followed(compiler, schema):
    assert told_well(check(compiler, lambda param: of_schema(schema, param)))


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{i}": {"type": "string"} for i in range(900)}, "additionalProperties": False},
        {"enum": [f"value {i}" for i in range(5000)]},
        {"anyOf": [{"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(300)]},
        {"type": "string", "maxLength": 100_000},
        {"type": "integer", "multipleOf": 9973},
        {"type": "number", "multipleOf": 0.01},
        {"type": "object", "properties": {"c": {"$ref": "#"}}},
        {"type": "object", "patternProperties": {"^x-": {"type": "string"}}, "properties": {"a": {}}},
    ],
)  # fmt: skip
def test_large_schemas_that_can(compiler, schema):
    grammar = of_schema(schema)
    compiler.check(grammar, "guided_json")
    for seed in range(3):
        follows_to_its_end(compiler, grammar, seed)


@pytest.mark.parametrize("text", ["\u007f", "\u0080", 'a"b\\c', "\n\t\x00", "é\u2028", "", "/x/", "{}", "😀"])
def test_any_text_is_a_choice(compiler, text):
    grammar = of_choice([text, "other"])
    compiler.check(grammar, "guided_choice")
    if text:
        from afserve.tokens.tokenizer import Tokenizer

        ids = Tokenizer.from_folder(NANO).encode(text, add_special_tokens=False)
        matcher = compiler.compile(grammar)
        matcher.consume(ids)
        assert matcher.is_complete or matcher.allows(END)


def test_inner_words_stay_inside():
    state = "lexer error: too many expressions constructed\n<state>\n" + json.dumps({"lexer_ops": 0})
    for inner in (
        state,
        "panic: index out of range\n<backtrace>",
        "NoExtensionBias",
        "Current row has 9 items; max is 8",
    ):
        assert not any(word in in_words(inner) for word in INNER)
    assert in_words('Unknown name "x"') == 'Unknown name "x"'
