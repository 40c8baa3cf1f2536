"""Tool calls as Qwen3-Coder writes them: `<function=NAME>`, then each argument as the text of a `<parameter=KEY>`.

The text of an argument becomes JSON by its type in the tool's schema, and by what it looks like where there is none.
"""

import json
from collections.abc import Mapping

from afserve.server.reading.parts import Argued, Called, Part, Said, held

Types = Mapping[str, Mapping[str, str]]  # function -> parameter -> type
_OPENS = ("<tool_call>", "<function=")
_INSIDE = ("<parameter=", "</function>")


class XmlCallReader:
    """A parameter goes out when it is whole."""

    def __init__(self, types: Types) -> None:
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
        return [Said(rest)] if rest.strip() or (rest and not self._calls) else []

    def _in_words(self, parts: list[Part]) -> bool:
        text = self._text
        if self._calls:
            text = text.lstrip().removeprefix("</tool_call>").lstrip()
        at = text.find("<function=")
        end = text.find(">", at)
        if at >= 0 and end >= 0:
            words = text[:at].removesuffix("<tool_call>\n").removesuffix("<tool_call>")
            if words.strip():
                parts.append(Said(words))
            self._name, self._given = text[at + len("<function=") : end].strip(), 0
            self._text = text[end + 1 :]
            parts.append(Called(self._calls, self._name))
            return True
        first = min((p for m in _OPENS if (p := text.find(m)) >= 0), default=None)
        keep = len(text) - first if first is not None else held(text, (*_OPENS, "</tool_call>"))
        if text[: len(text) - keep]:
            parts.append(Said(text[: len(text) - keep]))
        self._text = text[len(text) - keep :]
        return False

    def _in_call(self, parts: list[Part]) -> bool:
        text = self._text.lstrip()
        if text.startswith("</function>"):
            parts.append(Argued(self._calls, "}" if self._given else "{}"))
            self._name, self._text = None, text[len("</function>") :]
            self._calls += 1
            return True
        if not text.startswith("<parameter="):
            at = min((p for m in _INSIDE if (p := text.find(m)) > 0), default=None)
            self._text = text if at is None else text[at:]
            return at is not None
        name_end, end = text.find(">"), text.find("</parameter>")
        if name_end < 0 or end < 0:
            return False
        key = text[len("<parameter=") : name_end].strip()
        value = text[name_end + 1 : end].removeprefix("\n").removesuffix("\n")
        lead = ", " if self._given else "{"
        parts.append(Argued(self._calls, f"{lead}{json.dumps(key)}: {self._json(key, value)}"))
        self._given += 1
        self._text = text[end + len("</parameter>") :]
        return True

    def _json(self, key: str, value: str) -> str:
        if self._types.get(self._name or "", {}).get(key) == "string":
            return json.dumps(value, ensure_ascii=False)
        try:
            return json.dumps(json.loads(value), ensure_ascii=False)
        except (ValueError, RecursionError):
            return json.dumps(value, ensure_ascii=False)
