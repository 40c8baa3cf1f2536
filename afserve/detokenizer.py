"""Tokens to text one at a time: never half a character, and stop strings found across token boundaries.

Feeding the same tokens always gives the same final text, however they are grouped. Knows no requests.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from afserve.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_HELD = 16


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text that is certain after this token, possibly empty."""
        ...

    def finish(self) -> str:
        """What was held back; an incomplete character becomes U+FFFD."""
        ...


def detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Detokenizer:
    kind = ByteDetokenizer if tokenizer.byte_level else WindowDetokenizer
    return kind(tokenizer, skip_special_tokens)


class ByteDetokenizer:
    """For byte-level vocabularies: every token is a run of bytes, so UTF-8 itself says what is complete."""

    __slots__ = ("_partial", "_skipped", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = False  # a character has begun

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not self._partial and (text := self._tokenizer.token_text(token_id)) is not None:
            return text
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._partial = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        self._partial = False
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any other vocabulary: decode a short window with and without the new tokens, emit the difference.

    A window is kept because a token's text can depend on the one before it (a leading space, byte fallback).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._read = 0
        self._known = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(
            "replace"
        )  # says whether a character is incomplete

    def push(self, token_id: int) -> str:
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        self._utf8.decode(self._tokenizer.token_bytes(token_id))
        incomplete = bool(self._utf8.getstate()[0])
        text = self._decode(self._window)
        if incomplete and text.endswith(REPLACEMENT) and len(self._window) - self._read < MAX_HELD:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        return self._emit(self._decode(self._window)) if self._window else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._known) :]
        if new:
            self._window = self._window[self._read :]
            self._known = self._decode(self._window)
            self._read = len(self._window)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class StopStrings:
    """Passes text through up to the first stop string; holds back only what may still become one.

    The match that ends first wins, and of those the longest, so the result does not depend on how the text
    was cut into pieces. `matched` is the stop string found; after it nothing more comes out.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = self._first()
        if found is not None:
            start, self.matched = found
            end = start + len(self.matched) if self._include else start
            out, self._held = self._held[:end], ""
            return out
        keep = self._undecided()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        out, self._held = self._held, ""
        return out

    def _first(self) -> tuple[int, str] | None:
        hits = [(self._held.find(stop), stop) for stop in self._stops]
        ends = [(at + len(stop), at, stop) for at, stop in hits if at >= 0]
        if not ends:
            return None
        _, at, stop = min(ends)
        return at, stop

    def _undecided(self) -> int:
        """Length of the longest tail of the held text that begins some stop string."""
        return max(_overlap(self._held, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
