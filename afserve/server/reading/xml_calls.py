"""Tool calls whose arguments are the text of tags, as Qwen3-Coder, MiniMax-M2 and GLM-4.5 write them.

The text of an argument becomes JSON by its type in the tool's schema, and by what it looks like where there is none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from afserve.server.reading.parts import Argued, Called, Content, Part, held

Types = Mapping[str, Mapping[str, str]]  # function -> parameter -> type


@dataclass(frozen=True, slots=True)
class Dialect:
    """`wraps` are dropped around calls. A call is `opens`, its name, `named`, its arguments, `closes`; an argument is
    `key`, its name, `keyed`, white space and `value` where that is not "", its text, `valued`. Where `named` is "" a
    name ends with white space or with the next tag."""

    opens: str
    named: str
    closes: str
    key: str
    keyed: str
    value: str
    valued: str
    wraps: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opens, *self.wraps)


QWEN = Dialect(
    "<function=", ">", "</function>", "<parameter=", ">", "", "</parameter>", ("<tool_call>", "</tool_call>")
)
MINIMAX = Dialect(
    '<invoke name="',
    '">',
    "</invoke>",
    '<parameter name="',
    '">',
    "",
    "</parameter>",
    ("<minimax:tool_call>", "</minimax:tool_call>"),
)
GLM = Dialect("<tool_call>", "", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


class XmlCallReader:
    """A parameter goes out when it is whole."""

    def __init__(self, dialect: Dialect, types: Types) -> None:
        self._dialect = dialect
        self._types = types
        self._text = ""
        self._calls = 0
        self._name: str | None = None
        self._given = 0

    def feed(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while self._in_call(parts) if self._name is not None else self._in_words(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        rest, self._text = self._text, ""
        if self._name is not None:
            return []
        return [Content(rest)] if rest.strip() or (rest and not self._calls) else []

    def _in_words(self, parts: list[Part]) -> bool:
        text, to = self._text, self._dialect
        if self._calls:
            text = text.lstrip()
            for wrap in to.wraps:
                text = text.removeprefix(wrap).lstrip()
        at = text.find(to.opens)
        name = None if at < 0 else self._named(text[at + len(to.opens) :])
        if name is not None:
            words = text[:at]
            for wrap in to.wraps:
                words = words.removesuffix(f"{wrap}\n").removesuffix(wrap)
            if words.strip():
                parts.append(Content(words))
            self._name, self._text = name
            self._given = 0
            parts.append(Called(self._calls, self._name))
            return True
        first = min((p for m in to.markers if (p := text.find(m)) >= 0), default=None)
        keep = len(text) - first if first is not None else held(text, to.markers)
        if text[: len(text) - keep]:
            parts.append(Content(text[: len(text) - keep]))
        self._text = text[len(text) - keep :]
        return False

    def _named(self, text: str) -> tuple[str, str] | None:
        """A function's name and what follows; None where its end is not there yet."""
        to = self._dialect
        if to.named:
            name, found, rest = text.partition(to.named)
            return (name.strip(), rest) if found else None
        name = text.lstrip()
        ends = [at for mark in (to.key, to.closes, "\n", " ") if (at := name.find(mark)) > 0]
        return (name[: min(ends)].strip(), name[min(ends) :]) if ends else None

    def _in_call(self, parts: list[Part]) -> bool:
        text, to = self._text.lstrip(), self._dialect
        if text.startswith(to.closes):
            parts.append(Argued(self._calls, "}" if self._given else "{}"))
            self._name, self._text = None, text[len(to.closes) :]
            self._calls += 1
            return True
        if not text.startswith(to.key):
            at = min((p for m in (to.key, to.closes) if (p := text.find(m)) > 0), default=None)
            self._text = text if at is None else text[at:]
            return at is not None
        found, value, rest = text.partition(to.valued)
        key, keyed, begun = found[len(to.key) :].partition(to.keyed)
        if not value or not keyed:
            return False
        words = begun.lstrip().removeprefix(to.value) if to.value else begun
        words = words.removeprefix("\n").removesuffix("\n")
        lead = ", " if self._given else "{"
        parts.append(
            Argued(self._calls, f"{lead}{json.dumps(key.strip())}: {self._json(key.strip(), words)}")
        )
        self._given += 1
        self._text = rest
        return True

    def _json(self, key: str, value: str) -> str:
        if self._types.get(self._name or "", {}).get(key) == "string":
            return json.dumps(value, ensure_ascii=False)
        try:
            return json.dumps(json.loads(value), ensure_ascii=False)
        except (ValueError, RecursionError):
            return json.dumps(value, ensure_ascii=False)
