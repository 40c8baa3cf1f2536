"""One JSON value, or one literal of Python as models write them, to JSON text while it comes.

Valid JSON passes as it is written. What JSON does not know (`True`, `None`, `'x'`, `(1, 2)`, `NaN`, a comma too many,
raw ends of lines in strings) becomes JSON; NaN and what is infinite become strings. The first character that fits
neither ends the value. No recursion, and at most MOST_DEPTH brackets.
"""

import json
import math
import re
import sys

MOST_DEPTH = 512
_SPACE = " \t\r\n"
_CLOSES = {"{": ("}", "}"), "[": ("]", "]"), "(": (")", "]")}  # as it is read, as it is written
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_WORDS |= {word: json.dumps(word) for word in ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf")}
_TOKEN = re.compile(r"[A-Za-z0-9_.+-]+")
_PLAIN_TOKEN = re.compile(r"[^\s,:{}\[\]()\"'\\]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"([+-]?)(0|[1-9][0-9]*)?(?:(\.)([0-9]*))?((?:[eE][+-]?[0-9]+)?)")
_STREAMED = re.compile(r"-?[1-9][0-9]*")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
_ESCAPED = '"\\/bfnrt'
_HEX = re.compile(r"[0-9a-fA-F]+")
_DIGITS = {"u": 4, "x": 2, "U": 8}


class LiteralWriter:
    """`streamed`: digits go out as they come, so that a number beyond a double's range stays a number.

    `plain_names`: names of an object's values may stand without quotes.

    `broken`: it ended at a character that fits nothing. `done` is true then, too. `mended`: a bracket was missing.
    """

    def __init__(self, *, streamed: bool = True, plain_names: bool = False) -> None:
        self.done = False
        self.broken = False
        self.mended = False
        self._streamed = streamed
        self._plain_names = plain_names
        self._token = _PLAIN_TOKEN if plain_names else _TOKEN
        self._want = "value"  # value, first, item, key, first key, colon or more
        self._open: list[tuple[str, str]] = []
        self._quote = ""
        self._escape = ""
        self._word = ""
        self._sent = 0  # characters of `_word`
        self._gap = ""  # a comma and the space behind it, kept until something follows
        self._out: list[str] = []

    def write_text(self, text: str) -> tuple[str, str]:
        """(JSON text, what comes behind the value). A word that breaks the value is in the second, whole."""
        at = 0
        while at < len(text) and not self.done:
            if self._quote:
                at = self._in_string(text, at)
            elif self._word:
                at = self._in_word(text, at)
            else:
                at = self._between(text, at)
        rest = text[at:]
        if self.broken:
            rest, self._word = self._word[self._sent :] + rest, ""
        return self._taken(), rest

    def close_text(self) -> str:
        """What makes it JSON, wherever it stands."""
        if self._quote:
            self._end_string()
        elif self._word:
            self._end_word()
        if not self.done or self.broken:
            self._end_missing()
            self._out += [closer for _, closer in reversed(self._open)]
            self._open.clear()
            self._want = "more"
        self.done = True
        return self._taken()

    def _taken(self) -> str:
        said = "".join(self._out)
        self._out.clear()
        return said

    def _end_container(self, char: str) -> None:
        """And those in it that were not closed."""
        self.mended |= self._want in ("value", "colon") or char != self._open[-1][0]
        self._end_missing()
        closer = ""
        while closer != char:
            closer, written = self._open.pop()
            self._begin(written, comma=False)
        self._end_value()

    def _end_missing(self) -> None:
        if self._want == "colon":
            self._out.append(": null")
        elif self._want == "value":
            self._out.append("null")

    def _break(self) -> None:
        self.broken = self.done = True

    # ---- between tokens

    def _between(self, text: str, at: int) -> int:
        char, want = text[at], self._want
        if char.isspace():
            self._space(char)
        elif char in "\"'" and want not in ("colon", "more"):
            self._begin('"')
            self._quote = char
        elif char in "{[(" and want in ("value", "first", "item") and len(self._open) < MOST_DEPTH:
            self._begin("[" if char == "(" else char)
            self._open.append(_CLOSES[char])
            self._want = "first key" if char == "{" else "first"
        elif any(char == closer for closer, _ in self._open):
            self._end_container(char)
        elif char == ":" and want == "colon":
            self._begin(":")
            self._want = "value"
        elif char == "," and want == "more":
            self._gap = ","
            self._want = "key" if self._open[-1][1] == "}" else "item"
        elif self._token.match(char) and want not in ("colon", "more"):
            return self._in_word(text, at)
        else:
            self._break()
            return at
        return at + 1

    def _space(self, char: str) -> None:
        """White space of JSON stays, but in front of the whole value."""
        if char not in _SPACE or (self._want == "value" and not self._open):
            return
        if self._gap:
            self._gap += char
        else:
            self._out.append(char)

    def _begin(self, text: str, *, comma: bool = True) -> None:
        self._out += [self._gap if comma else self._gap[1:], text]
        self._gap = ""

    def _end_token(self) -> None:
        if "key" in self._want:
            self._want = "colon"
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._want = "more"
        self.done = not self._open

    # ---- words and numbers

    def _in_word(self, text: str, at: int) -> int:
        found = self._token.match(text, at)
        if found is None:
            self._end_word()
            return at
        self._word += found[0]
        digits = _STREAMED.match(self._word) if self._streamed and "key" not in self._want else None
        if digits is not None and digits.end() > self._sent:
            self._begin(self._word[self._sent : digits.end()])
            self._sent = digits.end()
        return found.end()

    def _end_word(self) -> None:
        named = self._plain_names and "key" in self._want
        word = json.dumps(self._word) if named else self._json_of(self._word)
        if word is None:
            self._want = "more" if self._sent else self._want
            self._break()
            return
        if "key" in self._want:
            word = json.dumps(word) if word[:1] != '"' else word
        self._begin(word[self._sent :])
        self._word, self._sent = "", 0
        self._end_token()

    def _json_of(self, word: str) -> str | None:
        if word in _WORDS:
            return _WORDS[word]
        if not _NUMBER.fullmatch(word):
            found = _PYTHON_NUMBER.fullmatch(word)
            if found is None or not (found[2] or found[4]):
                return None
            fraction = f".{found[4] or '0'}" if found[3] else ""
            word = f"{found[1].strip('+')}{found[2] or '0'}{fraction}{found[5]}"
        finite = self._sent or word.lstrip("-").isdigit() or math.isfinite(float(word))
        return word if finite else json.dumps(word)

    # ---- strings

    def _in_string(self, text: str, at: int) -> int:
        if self._escape:
            return self._in_escape(text, at)
        plain = _PLAIN[self._quote].match(text, at)
        if plain is not None:
            self._out.append(plain[0])
            return plain.end()
        char = text[at]
        if char == "\\":
            self._escape = char
        elif char == self._quote:
            self._end_string()
        else:
            self._out.append(json.dumps(char)[1:-1])
        return at + 1

    def _in_escape(self, text: str, at: int) -> int:
        """JSON's own stay; what JSON does not know is a backslash and what follows it."""
        held, char = self._escape[1:], text[at]
        if not held and char in _DIGITS:
            self._escape += char
            return at + 1
        if held and _HEX.match(char):
            self._escape += char
            if len(held) == _DIGITS[held[0]]:
                self._out.append(_escaped(self._escape))
                self._escape = ""
            return at + 1
        self._escape = ""
        if held or char not in _ESCAPED + "'":
            self._out.append("\\\\" + held)
            return at
        self._out.append(char if char == "'" else "\\" + char)
        return at + 1

    def _end_string(self) -> None:
        self._out.append('"')
        self._quote = self._escape = ""
        self._end_token()


def _escaped(escape: str) -> str:
    """A character's number in JSON's form."""
    code = int(escape[2:], 16)
    if escape[1] == "u":
        return escape
    return json.dumps(chr(code))[1:-1] if code <= sys.maxunicode else "\\" + escape


def json_literal(text: str) -> str | None:
    """The JSON text of what is JSON or a literal of Python as a whole; None for other words."""
    writer = LiteralWriter(streamed=False)
    said, rest = writer.write_text(text.strip() + " ")
    whole = writer.done and not (writer.broken or writer.mended or rest.strip())
    return said if whole else None
