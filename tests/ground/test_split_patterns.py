"""Expressions of tokenizers by their form: the published ones are quick, those that backtrack without end are not."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from afserve.tokens.split_patterns import is_quick

PUBLISHED = [
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+""",
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+""",
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*""",
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+ *|\s+(?!\S)|\s+",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"\p{N}{1,3}",
    "[ ]",
    r"[[a-z]&&[^aeiou]]+",
    r"[[:alpha:]]+x",
    r"\x{20}+",
]
ENDLESS = [
    r"(a+)+$|(x*x*x*)*y",
    "(a|a)*b",
    "(a|ab)*c",
    "(.*a){25}",
    "(x+x+)+y",
    r"(\w+\s?)*$",
    "(?:a*)*b",
    "(?:(?:a)+)+b",
    "(?>a*)*b",
    "(?=(a+)+b)a",
    "x*x*y",
    "x*x*x*y",
    "x{0,500}x{0,500}y",
    "x{3,}x{3,}y",
    "a?" * 30 + "a" * 30,
    "(a?){30}a{30}",
    "(a{0,9}){9}b",
    r"(a)\1+",
    r"(?<n>a)\k<n>*b",
    r"(?<n>a\g<n>?b)",
    "a{2000}",
    "a{1,99999}b",
    "(a",
    "a)",
    "[a",
    "a{,}",
    "(" * 100 + "a" + ")" * 100,
    "(?#c)a",
    "(*FAIL)",
]


@pytest.mark.parametrize("expression", PUBLISHED)
def test_what_published_tokenizers_have_is_quick(expression):
    assert is_quick(expression)
    Regex(expression)


@pytest.mark.parametrize("expression", ENDLESS)
def test_what_may_backtrack_without_end_is_not(expression):
    assert not is_quick(expression)
    assert not is_quick(f"z|{expression}")


_ATOMS = st.sampled_from(["a", "x", r"\s", r"\p{L}", "[ax]", "[^a]", ".", "a|x", "(?:a)", "(?:a|x)", "(?!a)"])
_REPEATS = st.sampled_from(["", "", "*", "+", "?", "{1,3}", "{2}", "{3,}", "*?", "++"])


@given(st.lists(st.tuples(_ATOMS, _REPEATS), min_size=1, max_size=6), st.booleans())
@settings(max_examples=300, deadline=None)
def test_what_is_called_quick_is(parts, wrapped):
    """A line of one letter, at which it is tried at every character, takes no more than a few steps for each pair."""
    expression = "".join(atom + repeat for atom, repeat in parts)
    if wrapped:
        expression = f"(?:{expression})+y"
    if not is_quick(expression):
        return
    try:
        splits = pre_tokenizers.Split(Regex(expression), "isolated")
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        assert "Oniguruma error" in str(error)  # it is none of the library's
        return
    for text in ("a" * 400, "x" * 400, "ax" * 200, " " * 400):
        began = time.process_time()
        splits.pre_tokenize_str(text)
        assert time.process_time() - began < 2.0, expression
