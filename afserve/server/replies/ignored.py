"""Wishes that were passed over: named in a header of the answer, and each once in the log.

Names hold what clients wrote, so only plain ones are told, and only so many.
"""

import logging
import re
from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

log = logging.getLogger("afserve.server")
HEADER = "x-afserve-ignored"
MOST_NAMES = 32
MOST_LOGGED = 256  # different ones of a gateway's life
_PLAIN = re.compile(r"[\w.\[\]-]{1,128}", re.ASCII)
_INDEX = re.compile(r"\[\d+\]")


def told_names(ignored: Sequence[str]) -> str:
    """The header's value. A field that is named stands for its parts, too."""
    plain = [name for name in dict.fromkeys(ignored) if _PLAIN.fullmatch(name)]
    whole = set(plain)
    names = [name for name in plain if not any(parent in whole for parent in _parents(name))]
    more = len(names) - MOST_NAMES
    return ", ".join([*names[:MOST_NAMES], *([f"{more} more"] if more > 0 else [])])


def _parents(name: str) -> list[str]:
    return [name[: at.start()] for at in re.finditer(r"[.\[]", name)]


class Ignored:
    def __init__(self) -> None:
        self._logged: set[str] = set()

    def headers(self, ignored: Sequence[str]) -> dict[str, str]:
        told = told_names(ignored)
        if not told:
            return {}
        self._note(told.split(", "))
        return {HEADER: told}

    def naming(self, send: Send, ignored: Sequence[str]) -> Send:
        """`send` whose answer names these in its head."""
        headers = self.headers(ignored)
        if not headers:
            return send

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers)
            await send(message)

        return named

    def _note(self, names: Sequence[str]) -> None:
        unknown = dict.fromkeys(_INDEX.sub("", name) for name in names if name not in self._logged)
        new = [each for each in unknown if each not in self._logged][: MOST_LOGGED - len(self._logged)]
        self._logged |= set(new)
        if new:
            log.warning(
                "passed over: %s (the header %s names what a request asks for in vain; --strict refuses it)",
                ", ".join(new),
                HEADER,
            )
