"""The JSON of a tool call, read as it comes: its name and its arguments, always as JSON.

Arguments that are an object go out as they are written. No arguments (none, null, "") are `{}`; a text that holds JSON
is that JSON.
"""

import json
import math
import re
from collections.abc import Collection

from afserve.server.reading.literal import LiteralWriter, json_literal
from afserve.server.reading.parts import held

NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
NO_ARGUMENTS = "{}"
NAME = r"[a-zA-Z0-9_.:-]{1,128}"
_SHAPE = re.compile(NAME)


def is_name(name: str, offered: Collection[str]) -> bool:
    """Of a function: one of those offered, where they are known."""
    return name in offered if offered else _SHAPE.fullmatch(name) is not None


def arguments_object(text: str) -> dict[str, object]:
    """Arguments as a value that is JSON again, for APIs that tell no text; those that were cut off are none."""
    try:
        value = json.loads(text, parse_float=_finite)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _finite(number: str) -> float | str:
    value = float(number)
    return value if math.isfinite(value) else number


class ArgumentsWriter:
    def __init__(self, *, plain_names: bool = False) -> None:
        self._writer = LiteralWriter(plain_names=plain_names)
        self._held: list[str] | None = None  # of a value that is no object
        self._said = ""

    @property
    def done(self) -> bool:
        return self._writer.done

    @property
    def broken(self) -> bool:
        return self._writer.broken

    def write_text(self, text: str) -> tuple[str, str]:
        """(JSON, what comes behind the value)"""
        said, rest = self._writer.write_text(text)
        if self._writer.broken:
            said += self._writer.close_text()
        return self._told(said), rest

    def close_text(self) -> str:
        return "" if self.done else self._told(self._writer.close_text())

    def _told(self, said: str) -> str:
        if said and self._held is None and not self._said:
            self._held = None if said.startswith("{") else []
        self._said = self._said or said[:1]
        if self._held is None:
            return said
        self._held.append(said)
        return _of_value("".join(self._held)) if self.done else ""


def _of_value(text: str) -> str:
    value = json.loads(text) if text.startswith('"') else None
    if isinstance(value, str):
        return arguments_of(value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return NO_ARGUMENTS if text in ("", "null") else text


def arguments_of(text: str) -> str:
    """The JSON of arguments that were written as a text: an object is closed, other words are a string."""
    if not text.strip() or json_literal(text) == "null":
        return NO_ARGUMENTS
    if not text.lstrip().startswith("{"):
        return json_literal(text) or json.dumps(text, ensure_ascii=False)
    writer = LiteralWriter()
    return writer.write_text(text.lstrip())[0] + writer.close_text()


class QuotedArguments(ArgumentsWriter):
    """Arguments whose texts stand between two of one `mark`, as they are, and whose names may stand alone (Gemma 4)."""

    def __init__(self, mark: str) -> None:
        super().__init__(plain_names=True)
        self._mark = mark
        self._text = ""  # may be the beginning of a mark
        self._inside = False

    def write_text(self, text: str) -> tuple[str, str]:
        text, self._text, said = self._text + text, "", []
        while text and not self.done:
            at = text.find(self._mark)
            marked = at >= 0
            at = at if marked else len(text) - held(text, (self._mark,))
            new, rest = super().write_text(self._shown(text[:at]) + '"' * marked)
            said.append(new)
            if self.done:
                return "".join(said), rest.removesuffix('"' * marked) + text[at:]
            self._inside ^= marked
            self._text, text = ("", text[at + len(self._mark) :]) if marked else (text[at:], "")
        return "".join(said), text

    def close_text(self) -> str:
        held_back, self._text = self._shown(self._text), ""
        said = super().write_text(held_back)[0] if held_back and not self.done else ""
        return said + super().close_text()

    def _shown(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)[1:-1] if self._inside else text


class CallObject:
    """Reads from `{` to the `}` that closes it. `failed`: it is no call, and what it was fed is text."""

    def __init__(self, offered: Collection[str] = ()) -> None:
        self.name: str | None = None
        self.done = False
        self.failed = False
        self.broken = False
        self._offered = offered
        self._want = "object"  # object, key, colon, value or more
        self._key: str | None = None
        self._value: LiteralWriter | ArgumentsWriter | None = None
        self._said: list[str] = []  # of a key or a value that is no arguments
        self._arguments: list[str] = []
        self._argued = False

    def write_text(self, text: str) -> tuple[str, str]:
        """(new text of the arguments, what comes behind the object)."""
        while text and not self.done and not self.failed:
            text = self._in_value(self._value, text) if self._value is not None else self._between(text)
        return self._taken(), text

    def close_text(self) -> str:
        """The arguments' end, where the text ended before the object."""
        if isinstance(self._value, ArgumentsWriter):
            self._arguments.append(self._value.close_text())
        self._end()
        return self._taken()

    def _taken(self) -> str:
        if self.name is None:
            return ""  # held until it is known whose they are
        said = "".join(self._arguments)
        self._arguments.clear()
        return said

    def _between(self, text: str) -> str:
        char, want = text[0], self._want
        if char.isspace():
            return text[1:]
        if want == "object" and char == "{":
            self._want = "key"
        elif want == "key" and char in "\"'":
            self._value = LiteralWriter()
            return text
        elif want == "colon" and char == ":":
            self._want = "value"
        elif want == "value":
            first = self._key in ARGUMENTS and not self._argued
            self._argued |= first
            self._value = ArgumentsWriter() if first else LiteralWriter()
            return text
        elif want == "more" and char == ",":
            self._want = "key"
        elif want in ("key", "more") and char == "}":
            self._end()
        else:
            self._break()
            return text
        return text[1:]

    def _in_value(self, value: LiteralWriter | ArgumentsWriter, text: str) -> str:
        said, rest = value.write_text(text)
        (self._arguments if isinstance(value, ArgumentsWriter) else self._said).append(said)
        if value.done:
            self._value = None
            if value.broken:
                self._break()
            else:
                self._end_value(isinstance(value, ArgumentsWriter))
        return rest

    def _end_value(self, arguments: bool) -> None:
        said = "" if arguments else "".join(self._said)
        self._said.clear()
        if self._want == "key":
            self._key, self._want = json.loads(said), "colon"
            return
        if self._key in NAMES and self.name is None:
            name = json.loads(said) if said.startswith('"') else ""
            self.failed = not is_name(name, self._offered)
            self.name = None if self.failed else name
        self._want = "more"

    def _break(self) -> None:
        self.broken = True
        self._end()

    def _end(self) -> None:
        self.done = True
        self.failed |= self.name is None
        if not any(self._arguments) and not self._argued:
            self._arguments.append(NO_ARGUMENTS)
