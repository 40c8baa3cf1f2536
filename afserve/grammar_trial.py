"""Whether a grammar can be followed, tried before a request with it is taken.

Some answers are begun with it, within a part of what a step of a running answer may take. All is counted in the
compiler's own units of work, so that a busy machine refuses nothing that an idle one takes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from afserve.regex_length import MAX_FORCED

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from numpy.typing import NDArray

WALKS, STEPS = 4, 64
_MOST_WORDS = 300
_TOO_LARGE = (
    "too many", "Too many", "too big", "too large", "too deeply", "max is", "exhausted", "exceed", "stack level",
    "fuel", "precomputation failed", "Unable to determine",
)  # fmt: skip
# What its errors begin with or have in them, and what a client reads instead.
_KNOWN = {
    "panic": "it cannot be compiled; write it more simply",
    "NoExtension": "it comes to a place where nothing can follow, so an answer could not end; take that branch out",
    "oneOf constraints": "oneOf is followed only where no two of its schemas can hold for one value; use anyOf",
    "to generate regex for": "the range of a number is too wide or too fine to be followed; use simpler bounds",
    "disjoint": "two patterns of patternProperties may match one key; write them so that each key matches one",
    "circular references": "a reference comes back to itself beside other keywords; put those where it leads",
}
_LONG = "forced:"
_SKIPPED = 32  # bytes


# Alternatives at one place of an answer: 4 for each optional property of an object, of which llguidance takes 500.
_MOST_ITEMS = 8192


def engine_limits() -> "LLParserLimits":
    """What a step of a running answer may take."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=_MOST_ITEMS, verbose_errors=False)


def trial_limits() -> "LLParserLimits":
    """A part of that: other texts than those tried may take more."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=50_000,
        step_max_items=25_000,
        max_items_in_row=_MOST_ITEMS // 2,
        max_lexer_states=20_000,
        verbose_errors=False,
    )


def in_words(error: str) -> str:
    """A compiler's error for a client: what it found, never its state or its numbers."""
    first = error.partition("\n<")[0].strip()
    known = next((words for part, words in _KNOWN.items() if part in first), None)
    if known is not None:
        return known
    if first.startswith(_LONG):
        return (
            f"there is a place where an answer can only be one text of {first.split()[-1]} bytes, at most {MAX_FORCED} "
            "are taken; use smaller repetitions and texts"
        )
    if any(words in first for words in _TOO_LARGE):
        return (
            "it is too complex, since there are too many ways in which an answer may follow it at once; use fewer or "
            "smaller repetitions, alternatives and texts"
        )
    return first[:_MOST_WORDS]


def find_trouble(matcher: "LLMatcher", tokenizer: "LLTokenizer", ends: Sequence[int]) -> str:
    """What goes wrong with one of the answers that are begun, "" for nothing. `matcher` has taken no token."""
    for number in range(WALKS):
        walk = _Walk(matcher.deep_copy(), tokenizer, list(ends), random.Random(number))
        if trouble := walk.run(repeats=number % 2 == 0):
            return trouble
    return ""


@dataclass(slots=True)
class _Walk:
    """One answer, begun by chance."""

    matcher: "LLMatcher"
    tokenizer: "LLTokenizer"
    ends: list[int]
    draws: random.Random
    last: int = -1

    def run(self, *, repeats: bool) -> str:
        """`repeats`: the token before is taken again where it can be, for repetitions go wrong late."""
        for _ in range(STEPS):
            if trouble := self.skip_forced():
                return trouble
            ids = self.allowed()
            if not len(ids):
                break
            if not (repeats and self.last in ids):
                self.last = int(ids[self.draws.randrange(len(ids))])
            if not self.matcher.consume_token(self.last):
                break
        return self.matcher.get_error()

    def allowed(self) -> "NDArray[np.intp]":
        """The tokens that may come next, without those that end a text; none where nothing can be followed."""
        bits = self.matcher.compute_bitmask()
        if self.matcher.is_error() or self.matcher.is_stopped():
            return np.empty(0, np.intp)
        allowed_V: NDArray[np.uint8] = np.unpackbits(
            np.frombuffer(bits, np.uint8), count=self.tokenizer.vocab_size, bitorder="little"
        )
        allowed_V[self.ends] = 0
        return np.flatnonzero(allowed_V)

    def skip_forced(self) -> str:
        """What can be written in one way only is not walked through step by step: each step looks at all of it."""
        forced = self.matcher.compute_ff_bytes()
        if len(forced) > MAX_FORCED:
            return f"{_LONG} {len(forced)}"
        if len(forced) > _SKIPPED:
            self.matcher.consume_tokens(self.tokenizer.tokenize_bytes(forced)[:-1])
        return ""
