"""Grammars that an answer must follow: written from a schema, a regex, choices or Lark; compiled against a tokenizer.

A grammar travels as text in llguidance's own form. Nothing here knows requests; llguidance and NumPy are imported when
the first grammar is used.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from afserve.errors import RequestError, shown
from afserve.grammars.grammar_trial import Trial, engine_limits, in_words, trial_limits
from afserve.grammars.json_schema import Schema
from afserve.grammars.regex_length import MAX_FORCED, shortest_length, too_long
from afserve.grammars.schema_reader import plain_schema
from afserve.json_file import LIST_BYTES, read_text

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from numpy.typing import NDArray

MAX_GRAMMAR_CHARACTERS = 1 << 17
MAX_CHOICES = 4096
MAX_RULES = 1000  # of Lark or GBNF: each may stand in the one before it, and the compiler recurs
_RULE = re.compile(r"^[ \t]*[!?]?[A-Za-z_][^:\n\"/]*:", re.MULTILINE)
# A space, or a new line with its indentation: with more, a model could write nothing else for ever.
_WHITE_SPACE = r"\x20|\x0A(\x20{0,20}|\x09{0,6})"


def of_schema(schema: Schema, param: str = "grammar") -> str:
    """JSON that a JSON schema allows. Raises RequestError for one that is too large or cannot be held."""
    return of_plain_schema(plain_schema(schema, param), param)


def of_plain_schema(schema: Mapping[str, object], param: str = "grammar") -> str:
    """The same of a schema, or several put together, that `plain_schema` has made."""
    from llguidance import LLMatcher

    text = json.dumps(schema, ensure_ascii=False)
    check_text(text, param)
    try:
        return LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_pattern": _WHITE_SPACE, "lenient": False}
        )
    except ValueError as error:
        raise _refused(param, str(error)) from error


def of_object() -> str:
    return of_schema({"type": "object"})


def of_regex(pattern: str, param: str = "regex") -> str:
    """Raises RequestError for half a character, which no text has."""
    from llguidance import LLMatcher

    check_text(pattern, param)
    if (shortest := shortest_length(pattern)) > MAX_FORCED:
        raise _refused(param, too_long(shortest))
    return LLMatcher.grammar_from_regex(pattern)


def of_choice(choices: Sequence[str], param: str = "choice") -> str:
    for choice in choices:
        check_text(choice, param)
    return of_lark("start: " + " | ".join(map(_quoted, choices)), param)


def _quoted(text: str) -> str:
    """As Lark reads it: like JSON, which leaves DEL as it is, and Lark does not."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def check_text(text: str, param: str) -> None:
    """Raises RequestError for one that no grammar is made of: too long, or with half a character."""
    check_length(text, param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refused(param, f"{shown(text[error.start])} is half a character (a lone surrogate)") from error


def check_length(text: str, param: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError.about(
            param,
            f"has {len(text)} characters as a grammar, at most {MAX_GRAMMAR_CHARACTERS} are compiled; send a shorter "
            "one",
        )


@dataclass(frozen=True, slots=True)
class Tag:
    """A piece of JSON in running text: what begins with `trigger` goes on as `begin`, `schema` and `end`."""

    trigger: str
    begin: str
    schema: Mapping[str, object]
    end: str


def of_tags(tags: Sequence[Tag], *, special: bool) -> str:
    """Any text, with such pieces in it; `special`: the triggers are special tokens."""
    from llguidance import StructTag

    own = [StructTag(trigger=t.trigger, begin=t.begin, grammar=dict(t.schema), end=t.end) for t in tags]
    return StructTag.to_grammar(own, assume_special=special)


def of_thought(most: int, opens: Sequence[int], closes: int, *, inside: bool) -> str:
    """Reasoning of at most `most` tokens between its marks, in front of any answer without reasoning.

    `opens` are the ids of the mark before it, one after the other, `closes` is that of the mark behind it. `inside`:
    the prompt has opened it, so the closing mark comes; else there may be no reasoning.
    """
    thought = (f"<[^{closes}]>{{0,{most}}} " if most else "") + f"<[{closes}]>"
    first = thought if inside else f"({_ids(opens)} {thought})?"
    other = " | ".join(f"{_ids(opens[:i])} <[^{token}]>" for i, token in enumerate(opens))
    return of_lark(f"start: {first} answer*\nanswer: {other}")


def _ids(tokens: Sequence[int]) -> str:
    return " ".join(f"<[{token}]>" for token in tokens)


def of_lark(grammar: str, param: str = "grammar") -> str:
    """Lark, as llguidance reads it; GBNF, which llama.cpp and vLLM take; or a grammar of this file, as it is."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    check_text(grammar, param)
    if grammar.lstrip().startswith("{"):
        return grammar
    if (rules := len(_RULE.findall(grammar))) > MAX_RULES:
        raise _refused(param, f"it has {rules} rules, at most {MAX_RULES} are taken; write it with fewer")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(grammar))
    except RecursionError as error:
        raise _refused(param, "it is nested too deeply; write it with more rules") from error
    except Exception as error:
        raise _refused(param, in_words(str(error))) from error


def _refused(param: str, why: str) -> RequestError:
    return RequestError.about(param, f"not a grammar that can be followed: {why}")


class Matcher:
    """How far one answer has come in its grammar. Not to be used by two threads at once."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> "Matcher":
        return Matcher(self._matcher.deep_copy(), self._vocab_size)

    def consume(self, tokens: Sequence[int]) -> None:
        """Raises RequestError where the grammar does not allow them, or following it takes too much."""
        if not self._matcher.consume_tokens(list(tokens)):
            self._raise("the tokens so far do not follow it")

    def allows(self, token: int) -> bool:
        """Whether this token may come next; costs a tenth of a mask."""
        return self._matcher.validate_tokens([token]) == 1

    def allowed_B(self) -> "NDArray[np.uint8]":
        """A bit for each token of the vocabulary that may come next, the first of a byte being its lowest. Raises
        RequestError as `consume`."""
        import numpy as np

        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            self._raise("it became too complex")
        return bits

    def forced(self) -> list[int]:
        """The tokens of the text that has to follow, as a tokenizer cuts it; others may spell it too."""
        return list(self._matcher.compute_ff_tokens())

    @property
    def is_complete(self) -> bool:
        """Nothing but the end of the text may follow."""
        return self._matcher.is_stopped()

    def _raise(self, otherwise: str) -> None:
        raise _refused("grammar", in_words(self._matcher.get_error()) or otherwise)


class Compiler:
    """Grammars of one checkpoint. Its tokenizer is read when the first one comes: about a second of 129,280 tokens."""

    def __init__(self, folder: str | Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`vocab_size` counts the rows of the LM head, `eos_ids` are the tokens that end a text."""
        self._folder = Path(folder)
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._trial: Trial | None = None

    def compile(self, grammar: str, param: str = "grammar") -> Matcher:
        """Raises RequestError that names `param` where it is none, or takes too much to follow."""
        return Matcher(self._matcher(grammar, param, engine_limits()), self._vocab_size)

    def check(self, grammar: str, param: str) -> None:
        """Raises RequestError as `compile`, and for one that is likely to take too much later on."""
        matcher = self._matcher(grammar, param, trial_limits())
        if self._trial is None:
            self._trial = Trial(self._open(), self._eos_ids)
        if trouble := self._trial.find_trouble(matcher):
            raise _refused(param, in_words(trouble))

    def _matcher(self, grammar: str, param: str, limits: "LLParserLimits") -> "LLMatcher":
        from llguidance import LLMatcher

        check_text(grammar, param)
        matcher = LLMatcher(self._open(), grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _refused(param, in_words(matcher.get_error()))
        return matcher

    def _open(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        if not self._eos_ids:
            raise RequestError("grammar: this model has no token that ends a text, so no grammar can end")
        if self._tokenizer is None:
            text = read_text(self._folder / "tokenizer.json", LIST_BYTES)
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        return self._tokenizer
