"""Tool calls as Python writes them, `[forecast(city='Bern', days=[1, 2]), time()]`, the form of LFM2.

Values are literals of Python, or JSON; each goes out as JSON while it comes.
"""

import json
import re
from dataclasses import dataclass

from afserve.server.reading.call_object import NAME
from afserve.server.reading.literal import LiteralWriter
from afserve.server.reading.parts import MOST_HEADER, Types

_FIRST = re.compile(rf"\s*\[\s*({NAME})\s*\(")
_FIRST_BEGUN = re.compile(rf"\s*(?:\[\s*(?:{NAME}\s*)?)?")
_NEXT = re.compile(rf"\s*({NAME})\s*\(")
_NEXT_BEGUN = re.compile(rf"\s*(?:{NAME}\s*)?")
_KEY = re.compile(r"([^\s=(),\[\]{}'\"]{1,256})\s*=")
_KEY_BEGUN = re.compile(r"[^\s=(),\[\]{}'\"]{0,256}\s*")


@dataclass(frozen=True, slots=True)
class PythonForm:
    """A list of calls between marks that are special tokens."""

    opens: tuple[str, ...]
    ends: tuple[str, ...]
    section: str = ""
    special: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, *self.ends)

    def open_call(self, types: Types) -> "PythonCall":
        return PythonCall()

    def item(self, types: Types) -> "PythonCall":
        return PythonCall(listed=True)

    def begins_item(self, text: str) -> bool:
        return re.match(r"[a-zA-Z0-9_]", text) is not None


LFM2 = PythonForm(("<|tool_call_start|>",), ("<|tool_call_end|>",))


class PythonCall:
    """A call behind its mark. `listed` from the start: one behind a comma."""

    def __init__(self, *, listed: bool = False) -> None:
        self._shape, self._begun = (_NEXT, _NEXT_BEGUN) if listed else (_FIRST, _FIRST_BEGUN)
        self._text = ""
        self._want = "name"  # name, key, value or more
        self._value = LiteralWriter()
        self._given = 0  # arguments whose name was read
        self._said: list[str] = []
        self.name: str | None = None
        self.failed = False
        self.done = False
        self.broken = False
        self.listed = True

    def feed_call(self, text: str) -> tuple[str, str]:
        self._text += text
        step = {
            "name": self._in_name,
            "key": self._in_key,
            "value": self._in_value,
            "more": self._behind_value,
        }
        while not (self.done or self.failed) and step[self._want]():
            pass
        rest = ""
        if self.done:
            rest, self._text = self._text, ""
        return self._taken(), rest

    def finish_call(self, *, cut: bool) -> tuple[str, str]:
        self.failed = self.name is None
        self.done = not self.failed
        if self._want == "value" and not cut:
            self._said.append(self._value.close_text())
        return ("" if cut or self.failed else self._taken() + "}"), ""

    def _taken(self) -> str:
        said = "".join(self._said)
        self._said.clear()
        return said

    def _in_name(self) -> bool:
        found = self._shape.match(self._text[:MOST_HEADER])
        if found is None:
            self.failed = len(self._text) > MOST_HEADER or not self._begun.fullmatch(self._text)
            return False
        self.name, self._text, self._want = found[1], self._text[found.end() :], "key"
        self._said.append("{")
        return True

    def _in_key(self) -> bool:
        self._text = self._text.lstrip()
        if self._text.startswith(")"):
            return self._end()
        found = _KEY.match(self._text)
        if found is not None:
            self._text = self._text[found.end() :]
            self._said.append(f"{', ' * (self._given > 0)}{json.dumps(found[1])}: ")
            self._given += 1
            self._want, self._value = "value", LiteralWriter()
        elif not _KEY_BEGUN.fullmatch(self._text):
            self._break()
        return found is not None

    def _in_value(self) -> bool:
        if not self._text:
            return False
        said, self._text = self._value.write_text(self._text)
        self._said.append(said)
        if self._value.broken:
            self._said.append(self._value.close_text())
            self._break()
        elif self._value.done:
            self._want = "more"
        return self._value.done

    def _behind_value(self) -> bool:
        self._text = self._text.lstrip()
        if self._text.startswith(","):
            self._text, self._want = self._text[1:], "key"
        elif self._text.startswith(")"):
            return self._end()
        elif self._text:
            self._break()
        return bool(self._text)

    def _break(self) -> None:
        self.broken = True
        self._said.append("}")
        self.done = True

    def _end(self) -> bool:
        self._text = self._text[1:]
        self._said.append("}")
        self.done = True
        return True
