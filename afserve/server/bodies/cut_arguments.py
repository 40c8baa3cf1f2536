r"""The arguments of a call that a client sends back, as the object that templates want, also where the call was cut.

OpenAI takes any text there: an answer that ended within a call is part of the conversation from then on.
"""

import json
import re
from collections.abc import Iterator

DEEPEST = 500  # what goes deeper is no call's arguments
_CLOSES = {"{": "}", "[": "]"}
# A string as far as it goes, with its last quote if it has one; or what gives the text its structure.
_PARTS = re.compile(r'"(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+("?)|[{}\[\],]', re.DOTALL)
_HALF_A_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")


def object_of(text: str) -> dict[str, object]:
    """The object that `text` spells. One that was cut has what was whole of it, and its last string as far as it goes;
    what is no object, nor the beginning of one, is the value of `arguments`."""
    for whole in (text, *_endings(text)):
        try:
            value = json.loads(whole, strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
        return {} if value in (None, "") else {"arguments": value}
    return {"arguments": text} if text.strip() else {}


def _endings(text: str) -> Iterator[str]:
    """The text closed behind its last character, then behind its last whole value."""
    if not text.lstrip().startswith("{"):
        return
    open_, last_value, cut = _structure(text)
    if not open_ or len(open_) > DEEPEST:
        return
    if cut is None:
        yield text + _closed(open_)
    else:
        yield _HALF_A_PAIR.sub("", text[:cut]) + '"' + _closed(open_)
    yield text[:last_value] + _closed(_structure(text[:last_value])[0])


def _structure(text: str) -> tuple[list[str], int, int | None]:
    """What is open at the end, where the last whole value ends, and how far a string goes that is not closed."""
    open_: list[str] = []
    last_value = 0
    for part in _PARTS.finditer(text):
        c = part[0]
        if c in _CLOSES:
            open_.append(c)
            last_value = part.end()
            if len(open_) > DEEPEST:
                break
        elif c == ",":
            last_value = part.start()
        elif c in ("}", "]"):
            if open_:
                open_.pop()
        elif not part[1]:
            return open_, last_value, part.end()
    return open_, last_value, None


def _closed(open_: list[str]) -> str:
    return "".join(_CLOSES[c] for c in reversed(open_))
