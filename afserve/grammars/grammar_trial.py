"""Whether a grammar can be followed, tried before a request with it is taken.

Some answers are begun with it, within a part of what a step of a running answer may take. All is counted in the
compiler's own units of work, so that a busy machine refuses nothing that an idle one takes.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from afserve.grammars.regex_length import MAX_FORCED

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from numpy.typing import NDArray

STEPS = 64
WALKS = (0, STEPS, 1, STEPS, 3)  # for each the step behind which it repeats itself
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


# Ways in which an answer may go on at one place: 4 for each optional property of an object. Then those of a whole mask,
# at most 10 ms: 900 such properties take half of it with a vocabulary of 128,000. Then new states of regexes: 14 ms.
_MOST_ITEMS, _STEP_ITEMS, _STEP_FUEL = 8192, 200_000, 200_000


def engine_limits() -> "LLParserLimits":
    """What a step of a running answer may take."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=_MOST_ITEMS,
        step_max_items=_STEP_ITEMS,
        step_lexer_fuel=_STEP_FUEL,
        verbose_errors=False,
    )


def trial_limits() -> "LLParserLimits":
    """Half of that: other texts than those tried may take more."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=_MOST_ITEMS // 2,
        step_max_items=_STEP_ITEMS // 2,
        step_lexer_fuel=_STEP_FUEL // 2,
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


class Trial:
    """Of one tokenizer. `ends` are the tokens that end a text."""

    def __init__(self, tokenizer: "LLTokenizer", ends: Sequence[int]) -> None:
        import numpy as np

        self._tokenizer = tokenizer
        texts = (tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size))
        self._words_V = np.array([text.isalnum() for text in texts])
        self._going_on_V = np.ones(tokenizer.vocab_size, np.bool_)
        self._going_on_V[list(ends)] = False

    def find_trouble(self, matcher: "LLMatcher") -> str:
        """What goes wrong with one of the answers that are begun, "" for nothing. `matcher` has taken no token."""
        for number, repeats_from in enumerate(WALKS):
            if trouble := self._walk(matcher.deep_copy(), random.Random(number), repeats_from):
                return trouble
        return ""

    def _walk(self, matcher: "LLMatcher", draws: random.Random, repeats_from: int) -> str:
        """One that repeats itself, since repetitions go wrong late, takes letters before what would end them."""
        last = -1
        for step in range(STEPS):
            if trouble := self._skip_forced(matcher):
                return trouble
            allowed_V = self._allowed_V(matcher)
            if repeats_from < STEPS and (allowed_V & self._words_V).any():
                allowed_V &= self._words_V
            ids = allowed_V.nonzero()[0]
            if not len(ids):
                break
            if step <= repeats_from or not allowed_V[last]:
                last = int(ids[draws.randrange(len(ids))])
            if not matcher.consume_token(last):
                break
        return matcher.get_error()

    def _allowed_V(self, matcher: "LLMatcher") -> "NDArray[np.bool_]":
        """The tokens that may come next, without those that end a text; none where nothing can be followed."""
        import numpy as np

        bits = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            return np.zeros(len(self._going_on_V), np.bool_)
        allowed_V: NDArray[np.bool_] = np.unpackbits(
            np.frombuffer(bits, np.uint8), count=len(self._going_on_V), bitorder="little"
        ).view(np.bool_)
        return allowed_V & self._going_on_V

    def _skip_forced(self, matcher: "LLMatcher") -> str:
        """What can be written in one way only is not walked through step by step: each step looks at all of it."""
        forced = matcher.compute_ff_bytes()
        if len(forced) > MAX_FORCED:
            return f"{_LONG} {len(forced)}"
        if len(forced) > _SKIPPED:
            matcher.consume_tokens(self._tokenizer.tokenize_bytes(forced)[:-1])
        return ""
