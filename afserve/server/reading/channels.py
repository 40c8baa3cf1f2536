"""Answers in the channels of gpt-oss ("harmony"): reasoning, calls and the answer itself, each a message of its own.

A message is a header, `<|message|>` and a body. The header names a channel (`analysis`, `commentary`, `final`) and may
name who it is for: `<|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}<|call|>`.
Of the first message, `<|start|>assistant` is the end of the prompt. Text without a header is the answer.
"""

import re

from afserve.server.reading.parts import Argued, Called, Part, Reader, Thought, held

CHANNEL, START, MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKERS = (CHANNEL, START, *_ENDS)
_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
THOUGHT_MARKS = ((CHANNEL, "analysis", MESSAGE), "<|end|>")  # before reasoning, and behind it
MOST_HEADER = 512  # characters


class ChannelReader:
    """`calls`: messages to functions are calls. What is neither reasoning nor a call goes to `after`."""

    def __init__(self, after: Reader, *, calls: bool) -> None:
        self._after = after
        self._takes_calls = calls
        self._text = ""
        self._header: str | None = None  # the marker that began it
        self._thinking = False
        self._calling = False
        self._calls = 0
        self._argued = False

    def feed(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while self._in_header(parts) if self._header is not None else self._in_body(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        rest, self._text = self._text, ""
        if self._header is not None:
            rest = self._header + rest
        self._body(parts, rest)
        self._end(parts)
        return parts + self._after.finish()

    def _in_header(self, parts: list[Part]) -> bool:
        header, found, rest = self._text.partition(MESSAGE)
        if not found and len(self._text) <= MOST_HEADER:
            return False
        if not found or len(header) > MOST_HEADER:
            begun, self._header = self._header or "", None
            self._body(parts, begun)
            return True
        header = (self._header or "") + header
        self._header, self._text = None, rest
        to = _TO.search(header)
        self._calling = to is not None and self._takes_calls
        self._thinking = not self._calling and header.rpartition(CHANNEL)[2].startswith("analysis")
        if to is not None and self._calling:
            parts.append(Called(self._calls, to[1]))
        return True

    def _in_body(self, parts: list[Part]) -> bool:
        found = [(at, marker) for marker in _MARKERS if (at := self._text.find(marker)) >= 0]
        if not found:
            keep = held(self._text, _MARKERS)
            self._body(parts, self._text[: len(self._text) - keep])
            self._text = self._text[len(self._text) - keep :]
            return False
        at, marker = min(found)
        self._body(parts, self._text[:at])
        self._text = self._text[at + len(marker) :]
        self._end(parts)
        if marker not in _ENDS:
            self._header = marker
        return True

    def _body(self, parts: list[Part], text: str) -> None:
        if not text:
            return
        if self._calling:
            self._argued = True
            parts.append(Argued(self._calls, text))
        elif self._thinking:
            parts.append(Thought(text))
        else:
            parts += self._after.feed(text)

    def _end(self, parts: list[Part]) -> None:
        """Of a message: a call without arguments has none, as JSON."""
        if self._calling:
            if not self._argued:
                parts.append(Argued(self._calls, "{}"))
            self._calls += 1
        self._calling = self._thinking = self._argued = False
