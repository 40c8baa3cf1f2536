"""Tool calls in the forms in which model families write them: a marker, a name, a JSON object.

A form that names the function inside its object (Hermes, Mistral) and one that writes it in front (DeepSeek, Kimi) are
read by the same machine: what stands between the marker and the first brace is the name, or nothing.
"""

import re
from dataclasses import dataclass

from afserve.server.reading.call_object import CallObject
from afserve.server.reading.parts import Argued, Called, Content, Part, held

MOST_HEADER = 512  # characters between a marker and the object


@dataclass(frozen=True, slots=True)
class CallForm:
    """`opens` begin a call; `noise` stands between calls and is dropped; `wraps` is dropped around a name.

    `special`: its markers are special tokens, which must not be left out of the text.
    """

    opens: tuple[str, ...]
    noise: tuple[str, ...] = ()
    wraps: str = ""
    special: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opens + self.noise


HERMES = CallForm(("<tool_call>",), ("</tool_call>",))
MISTRAL = CallForm(("[TOOL_CALLS]",), ("]", ","), r"\[ARGS\]|\[CALL_ID\].*", special=True)
DEEPSEEK = CallForm(
    ("<｜tool▁call▁begin｜>",),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```"),
    r"^function<｜tool▁sep｜>|<｜tool▁sep｜>|```json",
    special=True,
)
KIMI = CallForm(
    ("<|tool_call_begin|>",),
    ("<|tool_calls_section_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    r"^functions\.|:\d+\s*<\|tool_call_argument_begin\|>|<\|tool_call_argument_begin\|>",
    special=True,
)
GRANITE = CallForm(("<|tool_call|>",), ("]", ","), special=True)
HUNYUAN = CallForm(("<tool_calls>",), ("</tool_calls>", "]", ","))
# The form of an answer that a grammar makes a list of calls.
LIST = CallForm(("[",), ("]", ","))


class CallReader:
    """Text in a form to words and calls. Words around calls are kept, white space between them is not."""

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._text = ""
        self._raw = ""  # of a call that has no name yet
        self._calls = 0
        self._between = False
        self._header = False
        self._object: CallObject | None = None
        self._begun = False

    def feed(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        rest, self._text = self._text, ""
        if self._header or (self._object is not None and not self._begun):
            rest = self._raw + rest
        return [Content(rest)] if rest and not (self._between and not rest.strip()) else []

    def _advance(self, parts: list[Part]) -> bool:
        """One more part of the text; False where more text is needed."""
        if self._object is not None:
            return self._in_object(self._object, parts)
        if self._header:
            return self._in_header(parts)
        if self._between:
            return self._in_between()
        return self._in_words(parts)

    def _in_words(self, parts: list[Part]) -> bool:
        form, text = self._form, self._text
        found = [(at, marker) for marker in self._markers() if (at := text.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            _say(parts, text[:at])
            self._text = text[at + len(marker) :]
            self._header, self._between = marker in form.opens, marker not in form.opens
            self._raw = marker
            return True
        keep = held(text, self._markers())
        _say(parts, text[: len(text) - keep])
        self._text = text[len(text) - keep :]
        return False

    def _markers(self) -> tuple[str, ...]:
        """Outside of calls a comma is a comma."""
        return tuple(m for m in self._form.markers if len(m) > 1 or m in self._form.opens)

    def _in_between(self) -> bool:
        text = self._text.lstrip()
        for marker in self._form.markers:
            if text.startswith(marker):
                self._text = text[len(marker) :]
                opens = marker in self._form.opens
                self._header, self._between, self._raw = opens, not opens, marker
                return True
        if text.startswith("{") and "," in self._form.noise:
            self._text, self._header, self._between, self._raw = text, True, False, ""
            return True
        if not text or any(marker.startswith(text) for marker in self._form.markers):
            return False
        self._between, self._text = False, text
        return True

    def _in_header(self, parts: list[Part]) -> bool:
        at = self._text.find("{")
        if at < 0 and len(self._text) <= MOST_HEADER:
            return False
        if at < 0 or at > MOST_HEADER:
            _say(parts, self._raw + self._text[:1])
            self._text, self._header = self._text[1:], False
            return True
        header = self._text[:at]
        name = re.sub(self._form.wraps, "", header.strip()).strip().strip("[").strip()
        self._raw += header
        self._text, self._header = self._text[at:], False
        self._object, self._begun = CallObject(named=bool(name)), False
        self._object.name = name or None
        return True

    def _in_object(self, call: CallObject, parts: list[Part]) -> bool:
        text, self._text = self._text, ""
        arguments, rest = call.feed(text)
        if not self._begun:
            self._raw += text[: len(text) - len(rest)]
        if call.name is not None and not self._begun:
            self._begun = True
            parts.append(Called(self._calls, call.name))
        if arguments and self._begun:
            parts.append(Argued(self._calls, arguments))
        if not call.done:
            return False
        if not self._begun:
            _say(parts, self._raw)
        self._calls += self._begun
        self._object, self._between, self._text = None, True, rest
        return True


def _say(parts: list[Part], text: str) -> None:
    if text:
        parts.append(Content(text))
