"""Tool calls with arguments as a JSON object, in the forms in which model families write them.

A form names the function inside the object (Hermes, Mistral's list), or in a header between mark and object (DeepSeek,
Kimi, Mistral since v11). Only a header of the form's own shape makes a call.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from afserve.server.reading.call_object import (
    NAME,
    NO_ARGUMENTS,
    ArgumentsWriter,
    CallObject,
    QuotedArguments,
    is_name,
)
from afserve.server.reading.parts import MOST_HEADER, Types

_LIST = r"\s*(?P<list>\[)\s*"


@dataclass(frozen=True, slots=True)
class JsonForm:
    """`header` is what stands between a mark and the object: with a group `name` the object is the arguments, with a
    group `list` it is the first of several. `bare`: one that is a call without an object, too. `special`: the marks are
    special tokens: no words hold them, a call of a function that was not offered is one, and it ends open reasoning.
    `quote`: what stands around texts, and names stand alone."""

    opens: tuple[str, ...]
    ends: tuple[str, ...] = ()
    section: str = ""
    header: str = r"\s*"
    bare: str = r"(?!)"
    special: bool = False
    quote: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, *self.ends, *filter(None, (self.section,)))

    @property
    def stops(self) -> tuple[str, ...]:
        """What a header ends with: its object, or a mark. A fence is part of it."""
        return ("{", *(mark for mark in self.markers if mark != "```"))

    @property
    def named(self) -> bool:
        return "(?P<name>" in self.header

    @property
    def firsts(self) -> str:
        """What a header without a name may begin with, beside white space."""
        return "{[" if _LIST in self.header else "{"

    def open_call(self, types: Types) -> "JsonCall":
        return JsonCall(self, types)

    def item(self, types: Types) -> "JsonCall":
        return JsonCall(self, types, listed=True)

    def begins_item(self, text: str) -> bool:
        return text.startswith("{")

    def arguments(self) -> ArgumentsWriter:
        return QuotedArguments(self.quote) if self.quote else ArgumentsWriter()


HERMES = JsonForm(("<tool_call>",), ("</tool_call>",))
_ARGS = r"\[ARGS\]"
_MISTRAL = rf"\s*(?P<name>{NAME})(?:\[CALL_ID\]\s*\w{{1,64}}\s*)?"
MISTRAL = JsonForm(
    ("[TOOL_CALLS]",),
    header=rf"{_LIST}|\s*|{_MISTRAL}(?:{_ARGS})?\s*",
    bare=rf"{_MISTRAL}{_ARGS}\s*",
    special=True,
)
_SEP = "<｜tool▁sep｜>"
_FENCE = r"\s*(?:```(?:json)?\s*)?"
_DEEPSEEK = rf"\s*(?:function{_SEP}\s*(?P<name>{NAME})|(?P<plain>{NAME}){_SEP}){_FENCE}"
DEEPSEEK = JsonForm(
    ("<｜tool▁call▁begin｜>",),
    ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    "<｜tool▁calls▁begin｜>",
    header=_DEEPSEEK,
    bare=rf"{_DEEPSEEK}(?:null)?\s*(?:```)?\s*",
    special=True,
)
_KIMI = rf"\s*(?:functions\.)?(?P<name>{NAME}?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
KIMI = JsonForm(
    ("<|tool_call_begin|>",),
    ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    "<|tool_calls_section_begin|>",
    header=_KIMI,
    bare=rf"{_KIMI}(?:null)?\s*",
    special=True,
)
GRANITE = JsonForm(("<|tool_call|>",), header=rf"{_LIST}|\s*", special=True)
COHERE = JsonForm(("<|START_ACTION|>",), ("<|END_ACTION|>",), header=rf"{_LIST}|\s*", special=True)
GEMMA = JsonForm(
    ("<|tool_call>",),
    ("<tool_call|>",),
    header=rf"\s*call:\s*(?P<name>{NAME})\s*",
    special=True,
    quote='<|"|>',
)
HUNYUAN = JsonForm(("<tool_calls>",), ("</tool_calls>",), header=rf"{_LIST}|\s*")
# The form of an answer that a grammar makes a list of calls.
LIST = JsonForm(("[",), header=r"(?P<list>)\s*")


class JsonCall:
    """A call behind its mark. `listed` from the start: one of a list, behind its comma."""

    def __init__(self, form: JsonForm, types: Types, *, listed: bool = False) -> None:
        self._form = form
        self._offered: Collection[str] = () if form.special else types
        self._header: str | None = None if listed else ""
        self._object: CallObject | ArgumentsWriter = CallObject(self._offered)
        self.name: str | None = None
        self.failed = False
        self.done = False
        self.broken = False
        self.listed = listed

    def feed_call(self, text: str) -> tuple[str, str]:
        if self._header is None:
            return self._in_object(text)
        self._header += text
        stop = self._stop(self._header)
        if stop is None:
            return "", ""
        header, rest = self._header[:stop], self._header[stop:]
        self._header = None
        if rest.startswith("{"):
            self._begin(self._form.header, header)
            return ("", "") if self.failed else self._in_object(rest)
        return self._begin_bare(header), rest

    def finish_call(self, *, cut: bool) -> tuple[str, str]:
        if self._header is not None:
            closing = self._begin_bare(self._header)
            return ("" if cut else closing), ""
        closing = self._object.close_text()
        if isinstance(self._object, CallObject):
            self.failed = self._object.failed
        self.done = not self.failed
        return ("" if cut else closing), ""

    def _stop(self, header: str) -> int | None:
        """Where the header ends, or too far away; None where more text is needed."""
        first = header.lstrip()[:1]
        if first and not self._form.named and first not in self._form.firsts:
            return len(header) - len(header.lstrip())
        found = [at for mark in self._form.stops if (at := header.find(mark)) >= 0]
        if found or len(header) > MOST_HEADER + max(map(len, self._form.stops)):
            return min(found, default=len(header))
        return None

    def _begin(self, shape: str, header: str) -> None:
        found = re.fullmatch(shape, header) if len(header) <= MOST_HEADER else None
        groups = {} if found is None else found.groupdict()
        name = groups.get("name") or groups.get("plain")
        self.failed = found is None or (name is not None and not is_name(name, self._offered))
        self.listed = groups.get("list") is not None
        if name is not None and not self.failed:
            self.name, self._object = name, self._form.arguments()

    def _begin_bare(self, header: str) -> str:
        self._begin(self._form.bare, header)
        self.failed |= self.name is None
        self.done = not self.failed
        return NO_ARGUMENTS

    def _in_object(self, text: str) -> tuple[str, str]:
        call = self._object
        said, rest = call.write_text(text)
        if isinstance(call, CallObject):
            self.name, self.failed = call.name, call.failed
        self.done, self.broken = call.done and not self.failed, call.broken
        return said, rest
