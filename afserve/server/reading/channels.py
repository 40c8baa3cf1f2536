"""Answers in the channels of gpt-oss ("harmony"): reasoning, calls and the answer itself, each a message of its own.

A message is a header, `<|message|>` and a body. The header names a channel (`analysis`, `commentary`, `final`) and may
name who it is for: `<|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}<|call|>`.
Of the first message, `<|start|>assistant` is the end of the prompt, and ` to=...` may follow. Text without a header is
the answer.
"""

import re

from afserve.server.reading.call_object import ArgumentsWriter, arguments_of
from afserve.server.reading.parts import MOST_HEADER, Argued, Called, Part, Reader, Thought, held

CHANNEL, START, MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKERS = (CHANNEL, START, *_ENDS)
_RECEIVER = "to="
_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_FOR = r"\s*(?:to=[^\s<]+\s*)?"
_HEADER = re.compile(
    rf"(?:<\|start\|>\s*[\w.:-]+)?{_FOR}(?:<\|channel\|>\s*\w+{_FOR})?(?:<\|constrain\|>\s*)?\w*\s*"
)
THOUGHT_MARKS = ((CHANNEL, "analysis", MESSAGE), "<|end|>")  # before reasoning, and behind it


class ChannelReader(Reader):
    """`calls`: messages to functions are calls. What is neither reasoning nor a call goes to `after`.

    A mark in the words of an answer is one where a message may end or begin; elsewhere it is text.
    """

    def __init__(self, after: Reader, *, calls: bool) -> None:
        super().__init__()
        self._after = after
        self._takes_calls = calls
        self._first = True  # the prompt has begun a header, which may go on
        self._header: str | None = None  # the marker that began it
        self._thinking = False
        self._calling = False
        self._calls = 0
        self._arguments: ArgumentsWriter | None = None
        self._said: list[str] = []  # of arguments that are no object

    def _end(self, cut: bool) -> list[Part]:
        parts: list[Part] = []
        while self._text or self._header is not None:
            self._advance(parts, final=True)
        self._end_message(parts, cut)
        return parts + self._after.end_text(cut=cut)

    def _advance(self, parts: list[Part], *, final: bool) -> bool:
        if self._first and not self._begun(final):
            return False
        in_part = self._in_header if self._header is not None else self._in_body
        return in_part(parts, final)

    def _begun(self, final: bool) -> bool:
        """Whether it is known if the answer begins with the rest of a header."""
        text = self._text.lstrip()
        if not final and _RECEIVER.startswith(text):
            return False
        self._first = False
        self._header = "" if text.startswith(_RECEIVER) else None
        return True

    def _in_header(self, parts: list[Part], final: bool) -> bool:
        begun = self._header or ""
        header, found, rest = self._text.partition(MESSAGE)
        if not found and not final and len(self._text) <= MOST_HEADER + len(MESSAGE):
            return False
        self._header = None
        if not found or len(header) > MOST_HEADER or not _HEADER.fullmatch(begun + header):
            self._body(parts, begun)
            return True
        self._end_message(parts, False)
        header, self._text = begun + header, rest
        to = _TO.search(header)
        self._calling = to is not None and self._takes_calls
        self._thinking = not self._calling and header.rpartition(CHANNEL)[2].lstrip().startswith("analysis")
        if to is not None and self._calling:
            parts.append(Called(self._calls, to[1]))
        return True

    def _in_body(self, parts: list[Part], final: bool) -> bool:
        found = [(at, marker) for marker in _MARKERS if (at := self._text.find(marker)) >= 0]
        keep = 0 if found or final else held(self._text, _MARKERS)
        at, marker = min(found) if found else (len(self._text) - keep, "")
        self._body(parts, self._text[:at])
        self._text = self._text[at:]
        return bool(marker) and self._at_marker(parts, marker, final)

    def _at_marker(self, parts: list[Part], marker: str, final: bool) -> bool:
        rest = self._text[len(marker) :]
        if marker not in _ENDS:
            self._header, self._text = marker, rest
            return True
        follows = rest.lstrip()
        if not final and any(mark.startswith(follows) for mark in _MARKERS):
            return False
        if not follows or follows.startswith(_MARKERS):
            self._text = follows
            self._end_message(parts, False)
        elif self._calling or self._thinking:
            self._text = rest
            self._end_message(parts, False)
        else:
            self._body(parts, marker)
            self._text = rest
        return True

    def _body(self, parts: list[Part], text: str) -> None:
        if not text:
            return
        if self._calling:
            self._argue(parts, text)
        elif self._thinking:
            parts.append(Thought(text))
        else:
            parts += self._after.read_text(text)

    def _argue(self, parts: list[Part], text: str) -> None:
        """What stands behind an object is none of the arguments."""
        if self._arguments is None:
            self._said.append(text)
            text = "".join(self._said).lstrip()
            if not text.startswith("{"):
                return
            self._arguments = ArgumentsWriter()
            self._said.clear()
        said = "" if self._arguments.done else self._arguments.write_text(text)[0]
        if said:
            parts.append(Argued(self._calls, said))

    def _end_message(self, parts: list[Part], cut: bool) -> None:
        if self._calling:
            open_, said = self._arguments, "".join(self._said)
            rest = arguments_of(said) if open_ is None else "" if open_.done else open_.close_text()
            rest = rest if not cut else "" if open_ is not None else "{"
            if rest:
                parts.append(Argued(self._calls, rest))
            self._calls += 1
            self._arguments = None
            self._said.clear()
        self._calling = self._thinking = False
