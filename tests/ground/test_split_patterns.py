"""Expressions of tokenizers by their form: the published ones are quick, those that backtrack without end are not."""

from collections.abc import Callable, Iterator
from math import inf

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


Sees = Callable[[str], bool]
_NOT_A = "(?!a)"  # of no width
ATOMS: dict[str, Sees] = {
    "a": lambda c: c == "a", "x": lambda c: c == "x", r"\s": str.isspace, r"\p{L}": str.isalpha,
    "[ax]": lambda c: c in "ax", "[^a]": lambda c: c != "a", ".": lambda c: c != "\n", "(?:a)": lambda c: c == "a",
    "(?:a|x)": lambda c: c in "ax", _NOT_A: lambda c: c != "a",
}  # fmt: skip
REPEATS = {
    "": (1, 1), "*": (0, inf), "+": (1, inf), "?": (0, 1), "{1,3}": (1, 3), "{2}": (2, 2), "{3,}": (3, inf),
    "*?": (0, inf), "++": (1, inf),
}  # fmt: skip
_MOST_STEPS = 200_000


class Matcher:
    """Of an expression of ATOMS and REPEATS with backtracking, as the library's; `steps` counts what it tries."""

    def __init__(self, parts: list[tuple[str, str]], wrapped: bool) -> None:
        """`wrapped`: all of it repeated, and then a letter that no text has."""
        self.steps, self._wrapped = 0, wrapped
        self._branches: list[list[tuple[str, str]]] = [[]]
        for atom, repeat in parts:
            first, bar, last = atom.partition("|") if "(" not in atom else (atom, "", "")
            self._branches[-1].append((first, "" if bar else repeat))
            if bar:
                self._branches.append([(last, repeat)])

    def steps_at_every_character(self, text: str) -> int:
        self.steps = 0
        for at in range(len(text)):
            if self._wrapped:
                for _ in self._repeated(text, at):
                    self._step()
            else:
                any(True for branch in self._branches for _ in self._ends(branch, text, at))
        return self.steps

    def _step(self) -> None:
        self.steps += 1
        assert self.steps < _MOST_STEPS, "it goes on without end"

    def _repeated(self, text: str, at: int) -> Iterator[int]:
        for branch in self._branches:
            for end in self._ends(branch, text, at):
                if end > at:
                    yield from self._repeated(text, end)
                yield end

    def _ends(self, branch: list[tuple[str, str]], text: str, at: int) -> Iterator[int]:
        """Where the rest of a branch may end, in the order in which it is tried."""
        if not branch:
            yield at
            return
        (atom, repeat), *rest = branch
        least, most = REPEATS[repeat]
        found = [at]
        if atom == _NOT_A:
            found += [at] * (at == len(text) or ATOMS[atom](text[at])) * max(1, least)
        else:
            while len(found) <= most and found[-1] < len(text) and ATOMS[atom](text[found[-1]]):
                self._step()
                found.append(found[-1] + 1)
        tried = found[least:] if repeat == "*?" else found[least:][::-1]
        for end in tried[:1] if repeat == "++" else tried:
            self._step()
            yield from self._ends(rest, text, end)


@pytest.mark.slow
def test_the_matcher_tells_them_apart():
    quick, slow = Matcher([("a", "*"), ("x", "")], False), Matcher([("a", "*"), ("a", "*"), ("x", "")], False)
    found = [[one.steps_at_every_character("a" * size) for size in (20, 40)] for one in (quick, slow)]
    assert found[0][1] < 4.5 * found[0][0] and found[1][1] > 6 * found[1][0]
    with pytest.raises(AssertionError, match="without end"):
        Matcher([("a", "+")], True).steps_at_every_character("a" * 40)


@given(
    st.lists(
        st.tuples(st.sampled_from([*ATOMS, "a|x"]), st.sampled_from([*REPEATS])), min_size=1, max_size=6
    ),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_what_is_called_quick_is(parts, wrapped):
    """Twice as long a line, at which it is tried at every character, takes four times the steps; and the library, which
    counts none, ends."""
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
    matcher = Matcher(parts, wrapped)
    for text in ("a", "x", "ax", " "):
        splits.pre_tokenize_str(text * (400 // len(text)))
        half, whole = (matcher.steps_at_every_character(text * (size // len(text))) for size in (24, 48))
        assert whole <= 4.5 * half + 200, expression
