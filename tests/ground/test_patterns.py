"""Patterns of downloaded files: the answers are those of Python's `re`, and no pattern takes without end."""

import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.errors import CheckpointError
from afserve.patterns import Pattern, is_pattern

WHERE = "config.json: ignore"
NAMES = [
    "lm_head",
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.17.self_attn.kv_a_proj_with_mqa",
    "model.layers.3.mlp.gate",
    "model.layers.3.mlp.gate_proj",
    "model.layers.3.mlp.shared_experts.down_proj",
    "model.layers.60.mlp.experts.255.up_proj",
    "model.layers.2.block_sparse_moe.gate",
    "model.language_model.layers.2.linear_attn.in_proj_qkvz",
    "visual.blocks.3.attn.qkv",
    "mtp.layers.0.mlp.gate",
]
PUBLISHED = [
    "lm_head",
    ".*lm_head",
    ".*self_attn.*",
    ".*mlp.gate$",
    "visual.*",
    "vision_tower.*",
    ".*block_sparse_moe.gate",
    r".*block_sparse_moe\.gate$",
    ".*router",
    ".*shared_expert_gate$",
    ".*linear_attn.*",
    ".*mtp.*",
    "^mtp.*",
    ".*kv_a_proj_with_mqa$",
    r"model\.layers\.[0-2]\..*",
    r"model\.layers\.(0|1|2|60)\.mlp.*",
    r".*layers\.(?:[0-9]|1[0-7])\.self_attn\.[qkvo]_proj$",
    r".*\.mlp\.(gate|up|gate_up|down)_proj.*",
    r"^(?!.*\.mlp\.experts\.).*$",
    r"(?!.*experts).*_proj",
    r".*\.\d+\.mlp\.experts\.\d+\.(up|down)_proj",
    r".*\bgate\b",
    r".*\.3\..*gate.*",
    r".*attn",
    r"model\.(language_model\.)?layers\.\d{1,2}\.",
]


@pytest.mark.parametrize("text", PUBLISHED)
def test_published_patterns_hold_what_they_held(text):
    pattern = Pattern(text, WHERE)
    found = [name for name in NAMES if pattern.match(name)]
    assert found == [name for name in NAMES if re.match(text, name)]
    assert found or "vision" in text or "router" in text or "shared_expert_gate" in text


ATOMS = st.sampled_from(
    [
        "a",
        "b",
        ".",
        r"\.",
        "_",
        r"\d",
        r"\w",
        r"\W",
        "[ab]",
        "[^a.]",
        "[]a]",
        r"[\d_-]",
        r"\x61",
        "{",
        "7",
        " ",
    ]
)
PLACES = st.sampled_from(["^", "$", r"\b", r"\B", r"\A"])
TIMES = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{,2}", "{2,}", "{0}", "{1,2}?"])


def grown(parts):
    line = st.lists(parts, min_size=0, max_size=4).map("".join)
    group = st.lists(line, min_size=1, max_size=3).map("|".join)
    closed = st.builds("{}{})".format, st.sampled_from(["(", "(?:", "(?P<x>"]), group)
    return st.one_of(closed, st.builds("{}{}".format, closed, TIMES), line)


PIECES = st.one_of(ATOMS, st.builds("{}{}".format, ATOMS, TIMES), PLACES)
LATER = st.lists(st.recursive(PIECES, grown, max_leaves=10), min_size=1, max_size=4).map("".join)
AHEAD = st.lists(st.builds("{}{})".format, st.sampled_from(["(?=", "(?!", "^(?!"]), LATER), max_size=2).map(
    "".join
)
PATTERNS = st.builds("{}{}".format, AHEAD, LATER)
TEXTS = st.text("ab._7 ", min_size=1, max_size=12)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(PATTERNS, st.lists(TEXTS, min_size=1, max_size=6))
def test_answers_are_those_of_re(text, names):
    """`re` may take long for a pattern, but not for texts as short as these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if not is_pattern(text):
            return
        try:
            pattern = Pattern(text, WHERE)
        except CheckpointError as error:
            assert re.search(r"RE2 does not read|looks ahead in one of", str(error))
            return
        expected = re.compile(text)
        assert [pattern.match(name) for name in names] == [bool(expected.match(name)) for name in names]


ATTACKS = [
    "(a+)+$",
    "(a|aa)+$",
    "(a|a)*b",
    "(.*)*=",
    "(.*)+(.*)+(.*)+=",
    ".*.*.*.*.*.*.*.*=",
    r"(\w+\.?)+$",
    "(?:a?){60}a{60}b",
    "(a{0,60}){0,30}b",
    "(((a{1000}){1000}){1000})",
    "((((((.*)*)*)*)*)*)*=",
    "a{0,1900}b",
    "a{65535}",
    "a{99999999999999999999}",
    "(?:.*(?:a|b).{9})?(?!.*a.{7}a).*=",
    "(.*a.{18}|b)*=",
    ".*(.*(.*(.*a.{0,30}){0,10}b){0,3})=",
    "(" * 499 + "a" + ")" * 499,
    "(?!" * 200 + "a" + ")" * 200,
    "(?!" * 18 + ".*a.*b" + ")" * 18,
    "a?" * 499,
    ".*?" * 333,
    "|".join(f".*a.{{{count}}}" for count in range(110)),
    r"(\w+)\1+$",
    "(?<=a)b",
    "(?>a)",
    "(?i)a",
    "a" * 1001,
]


@pytest.mark.parametrize("text", ATTACKS)
@pytest.mark.parametrize("name", ["a" * 3000 + "!", "ab" * 1500, "model.layers.3." + "a" * 60 + ".b"])
def test_no_pattern_takes_without_end(text, name):
    """`re` would be at most of these for years."""
    try:
        held = Pattern(text, WHERE).match(name)
        assert not (held and "=" in text)
    except CheckpointError as error:
        assert str(error).startswith(f"{WHERE}: the pattern ") and "write it more simply" in str(error)


@settings(max_examples=150, deadline=None)
@given(
    st.recursive(
        st.sampled_from(["a", ".", "b", "[ab]", r"\w"]),
        lambda inner: st.one_of(
            st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "{0,40}", "{30}", "?", "{9,}"])),
            st.builds("(?:{}|{})".format, inner, inner),
            st.builds("{}{}".format, inner, inner),
            st.builds("(?!{}).".format, inner),
        ),
        max_leaves=25,
    ),
    st.text("ab", min_size=100, max_size=400),
)
def test_no_pattern_that_is_made_up_takes_without_end(text, name):
    try:
        assert not Pattern(text + "=", WHERE).match(name)
    except CheckpointError as error:
        assert WHERE in str(error)


def test_an_answer_does_not_depend_on_what_was_asked_before():
    pattern = Pattern(".*(a|b)c$", WHERE)
    for _ in range(2):
        assert [pattern.match(name) for name in ("xac", "xbc", "xcc", "ac", "acx")] == [1, 1, 0, 1, 0]
