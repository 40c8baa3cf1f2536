"""The shortest text of a regular expression, against texts that are tried."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.errors import RequestError
from afserve.grammars.grammar import of_regex
from afserve.grammars.regex_length import MAX_FORCED, shortest_length

atoms = st.sampled_from(["a", "b", r"\.", r"[ab]", r"[^b]", r"\w", ".", r"[\]a]"])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{0,2}", "{1,}", "*?", "{2}?"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=4,
)


@given(patterns)
def test_no_shorter_text_matches_and_one_of_this_length_does(pattern):
    length = shortest_length(pattern)
    for shorter in range(min(length, 5)):
        assert not any(re.fullmatch(pattern, "".join(t)) for t in itertools.product("ab.]", repeat=shorter))
    if length <= 5:
        assert any(re.fullmatch(pattern, "".join(t)) for t in itertools.product("ab.]", repeat=length))


@pytest.mark.parametrize(
    "pattern, length",
    [
        ("a{1000}{1000}", 10**6),
        ("((ab){1000}){1000}", 2 * 10**6),
        ("(a{1000}|b{1000000})c", 1001),
        (r"\p{L}{3}\x41\x{1F600}\u{41}", 6),
        ("(?i)ab(?s:.)(?P<name>c)(?<other>d)", 5),
        ("^a$", 1),
        ("", 0),
        ("a|", 0),
        ("(x{9999999999999}){9}", 1 << 40),
        ("(" * 50 + "a" + "){99}" * 50, 1 << 40),
    ],
)
def test_counted(pattern, length):
    assert shortest_length(pattern) == length


def test_the_limit():
    of_regex(f"a{{{MAX_FORCED}}}")
    with pytest.raises(
        RequestError, match=f"has {MAX_FORCED + 1} characters or more, at most {MAX_FORCED}"
    ) as refused:
        of_regex(f"a{{{MAX_FORCED + 1}}}", "guided_regex")
    assert refused.value.param == "guided_regex"


@pytest.mark.parametrize(
    "part",
    ["[", "[[:", "[a", "\\p{", "\\x{", "(?P<", "(?<", "(?i", "{1", "(", "(?:", "[^]", "\\", "{1,", "[[:x"],
)
def test_what_is_never_closed_is_read_once(part):
    assert shortest_length(part * 40_000) >= 0


@given(st.text(alphabet="()[]{}|*+?\\^$,0123456789ab.:-<>P", max_size=30))
def test_whatever_is_sent_has_a_length(text):
    assert shortest_length(text) >= 0
