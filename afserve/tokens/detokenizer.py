"""Tokens to text one at a time: never half a character, and stop strings found across token boundaries.

Feeding the same tokens always gives the same final text, however they are grouped. It is what the tokens add to the
text of the prompt in front of them, where a first word has its space. Knows no requests.
"""

import codecs
from collections.abc import Sequence

from afserve.tokens.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_HELD = 16
MOST_TAIL = 64  # tokens of a prompt that show nothing but spaces


def detokenizer(
    tokenizer: Tokenizer,
    prompt: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    echoes: bool = False,
) -> "ByteDetokenizer | WindowDetokenizer":
    """Of what follows `prompt`. A character that the prompt leaves incomplete belongs to what follows; where it stays
    incomplete, U+FFFD is only told with `echoes`: the prompt is told too, up to there."""
    kind = ByteDetokenizer if tokenizer.byte_level else WindowDetokenizer
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    return kind(tokenizer, skipped, _tail(tokenizer, prompt, skipped), echoes)


def text_up_to(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """The text of a prompt, special tokens spelled out, without a last character that is incomplete."""
    open_bytes = _open_bytes(tokenizer, _tail(tokenizer, prompt, frozenset()))
    if not tokenizer.byte_level:  # each of them is a token
        return tokenizer.decode(prompt[: len(prompt) - open_bytes], skip_special_tokens=False)
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    return text.removesuffix(REPLACEMENT) if open_bytes else text


def _tail(tokenizer: Tokenizer, prompt: Sequence[int], skipped: frozenset[int]) -> list[int]:
    """The last tokens of a prompt that are shown: as many as make sure that the text does not begin behind them, and
    that no character does before them."""
    tail: list[int] = []
    for token_id in reversed(prompt):
        if token_id not in skipped:
            tail.append(token_id)
            raw = tokenizer.token_bytes(token_id)
            if len(tail) == MOST_TAIL or (raw.strip() and raw[0] & 0xC0 != 0x80):
                break
    return tail[::-1]


def _open_bytes(tokenizer: Tokenizer, tail: Sequence[int]) -> int:
    """How many bytes at the end are the beginning of a character."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(b"".join(map(tokenizer.token_bytes, tail)))
    return len(utf8.getstate()[0])


class ByteDetokenizer:
    """For byte-level vocabularies: every token is a run of bytes, so UTF-8 itself says what is complete.

    `push` tells the text that is certain after a token, `flush` what was held back: an incomplete character is U+FFFD.
    """

    __slots__ = ("_partial", "_skipped", "_tokenizer", "_untold", "_utf8")

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], tail: Sequence[int], echoes: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(b"".join(map(tokenizer.token_bytes, tail)))
        self._partial = bool(self._utf8.getstate()[0])  # a character has begun
        self._untold = REPLACEMENT if self._partial and not echoes else ""

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not self._partial and (text := self._tokenizer.token_text(token_id)) is not None:
            return text
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._partial = bool(self._utf8.getstate()[0])
        return self._told(text)

    def flush(self) -> str:
        self._partial = False
        return self._told(self._utf8.decode(b"", final=True))

    def _told(self, text: str) -> str:
        if text and self._untold:
            text, self._untold = text.removeprefix(self._untold), ""
        return text


class WindowDetokenizer:
    """For any other vocabulary: decode a short window with and without the new tokens, emit the difference.

    A window is kept because a token's text can depend on the one before it (a leading space, byte fallback).
    """

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], tail: Sequence[int], echoes: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window = list(tail)
        self._read = len(tail) - _open_bytes(tokenizer, tail)
        self._known = self._decode(self._window[: self._read])
        untold = self._decode(self._window)[len(self._known) :]
        self._untold = "" if echoes else untold
        self._utf8 = codecs.getincrementaldecoder("utf-8")(
            "replace"
        )  # says whether a character is incomplete
        self._utf8.decode(b"".join(map(tokenizer.token_bytes, tail)))

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        self._utf8.decode(self._tokenizer.token_bytes(token_id))
        incomplete = bool(self._utf8.getstate()[0])
        text = self._decode(self._window)
        if incomplete and text.endswith(REPLACEMENT) and len(self._window) - self._read < MAX_HELD:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._window)) if self._window else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._known) :]
        if new:
            self._window = _tail(self._tokenizer, self._window, frozenset())
            self._known = self._decode(self._window)
            self._read = len(self._window)
            new, self._untold = new.removeprefix(self._untold), ""
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

    def flush(self) -> str:
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
