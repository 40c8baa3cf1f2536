"""One JSON object of a tool call, read as it comes: its name, and the raw text of its arguments.

Follows strings and brackets only: whether the arguments are valid JSON is for those who use them.
"""

import json

NAMES = ("name",)
ARGUMENTS = ("arguments", "parameters")


class CallObject:
    """Reads from `{` to the `}` that closes it. With `named` the object is the arguments themselves."""

    def __init__(self, *, named: bool = False) -> None:
        self.name: str | None = None
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._value: list[str] | None = [] if named else None
        self._string: list[str] = []
        self._named = named
        self._arguments: list[str] = []

    def feed(self, text: str) -> tuple[str, str]:
        """(new text of the arguments, what comes behind the object)."""
        for at, char in enumerate(text):
            self._take(char)
            if self.done:
                return self._new_arguments(), text[at + 1 :]
        return self._new_arguments(), ""

    def _new_arguments(self) -> str:
        if self.name is None and not self._named:
            return ""  # held until it is known whose they are
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

    def _take(self, char: str) -> None:
        if self._named:
            self._arguments.append(char)
        depth = self._depth
        was_string = self._in_string
        self._follow(char)
        if self._named or depth == 0:
            return
        if depth == 1 and not was_string and char in ",}":
            self._end_value()
        elif self._value is not None:
            self._in_value(char)
        elif depth == 1:
            self._in_key(char, was_string)

    def _follow(self, char: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth <= 0

    def _in_key(self, char: str, was_string: bool) -> None:
        if was_string or char == '"':
            self._string.append(char)
        elif char == ":":
            self._key, self._value = _text("".join(self._string)), []
            self._string.clear()

    def _in_value(self, char: str) -> None:
        assert self._value is not None
        if self._key in ARGUMENTS and (self._value or char in "{["):
            if not self._value:
                self._value.append("")  # marks that it is no string, and goes out as it is
            if self._value == [""]:
                self._arguments.append(char)
                return
        if self._value or not char.isspace():
            self._value.append(char)

    def _end_value(self) -> None:
        value = self._value
        if value is not None and value != [""]:
            raw = "".join(value).strip()
            if self._key in NAMES:
                self.name = self.name or _text(raw)
            elif self._key in ARGUMENTS:
                self._arguments.append(_text(raw) if raw.startswith('"') else raw)
        self._key, self._value = None, None


def _text(raw: str) -> str:
    """A JSON string's text; what is none is taken as it stands."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return raw.strip('"')
    return value if isinstance(value, str) else raw
