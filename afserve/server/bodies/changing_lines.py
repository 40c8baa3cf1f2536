"""Lines in front of system prompts that differ with every request and tell a model nothing, such as Claude Code's
`x-anthropic-billing-header: ...`. They do not enter the prompt, so that what follows them is found in the cache.

In front of each text is looked, whatever API the body is of. Knows no prompt.
"""

import re
from collections.abc import Mapping, Sequence

_TOLD = ("system", "developer")
_TEXTS = ("system", "instructions")
_MESSAGES = ("messages", "input")
_ASKED = "asked"  # of a response that follows another one
Body = Mapping[str, object]


class ChangingLines:
    """By the `names` in front of their colons, in any case; none where there are no names."""

    def __init__(self, names: Sequence[str]) -> None:
        listed = "|".join(map(re.escape, names))
        self._lines = re.compile(rf"\A(?:\s*(?:{listed}):[^\n]*(?:\n|\Z))+", re.IGNORECASE) if names else None

    def left_out(self, body: Body) -> Body:
        """The body without them: itself where it has none."""
        if self._lines is None:
            return body
        changed: dict[str, object] = {}
        asked = body.get(_ASKED)
        if isinstance(asked, dict) and (kept_asked := self.left_out(asked)) is not asked:
            changed[_ASKED] = kept_asked
        for name in _TEXTS:
            if (kept := self._texts(body.get(name))) is not body.get(name):
                changed[name] = kept
        for name in _MESSAGES:
            messages = body.get(name)
            if isinstance(messages, list):
                kept_all = [self._message(message) for message in messages]
                if any(kept is not one for kept, one in zip(kept_all, messages, strict=True)):
                    changed[name] = kept_all
        return {**body, **changed} if changed else body

    def _message(self, message: object) -> object:
        if not isinstance(message, dict) or message.get("role") not in _TOLD:
            return message
        content = self._texts(message.get("content"))
        return message if content is message.get("content") else {**message, "content": content}

    def _texts(self, value: object) -> object:
        """Of a text, or of parts: one that has nothing else is no part."""
        if isinstance(value, str):
            return self._rest(value)
        if not isinstance(value, list):
            return value
        parts = [(part, self._part(part)) for part in value]
        if all(kept is part for part, kept in parts):
            return value
        return [kept for _, kept in parts if kept is not None]

    def _part(self, part: object) -> object:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(text, str) or (rest := self._rest(text)) == text:
            return part
        return {**part, "text": rest} if rest else None

    def _rest(self, text: str) -> str:
        assert self._lines is not None
        found = self._lines.match(text)
        return text if found is None else text[found.end() :]
