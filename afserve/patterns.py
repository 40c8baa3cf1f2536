"""Regular expressions of a downloaded file: whether a text begins with one, in time that grows with the text's length.

Python's `re` tries ways one after the other, and (a+)+$ has twice as many for each character more: a config.json could
keep a start busy for years. RE2 does not, in bounded memory; it has no lookahead. Published patterns begin with one at
most, as in ^(?!.*experts).*, which is another pattern that must not match. Whatever else RE2 does not read is refused.
"""

import re
from typing import Any, NoReturn

from afserve.errors import CheckpointError, shown

MOST_CHARACTERS = 1000
_LOOK = re.compile(r"\^?\(\?([=!])")
_SET = r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]"  # an escape, or a set of characters
_TOKEN = re.compile(rf"{_SET}|.", re.DOTALL)
_AT_MOST = re.compile(rf"({_SET})|\{{,(?=[0-9]*\}})", re.DOTALL)  # a{,2}, which RE2 takes for text


def is_pattern(text: str) -> bool:
    """Whether it is a regular expression at all. One that is too long for `Pattern` is taken for one."""
    if len(text) > MOST_CHARACTERS:
        return True
    try:
        re.compile(text)
    except (RecursionError, OverflowError):
        return True
    except re.error:
        return False
    return True


class Pattern:
    """Raises CheckpointError, which names `where` it stands, for one that is not matched here."""

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where = text, where
        if len(text) > MOST_CHARACTERS:
            self._refuse(f"has {len(text)} characters, more than {MOST_CHARACTERS}")
        self._ahead: list[tuple[Any, bool]] = []  # and whether it has to match
        rest = text
        while look := _LOOK.match(rest):
            end, _ = _group(rest, look.end())
            self._ahead.append((self._read(rest[look.end() : end]), look[1] == "="))
            rest = rest[end + 1 :]
        if self._ahead and _group(rest, 0)[1]:
            self._refuse("looks ahead in one of its alternatives")
        self._rest = self._read(rest)

    def match(self, name: str) -> bool:
        """As `re.match`, of names: without line breaks, and \\w and \\d are ASCII."""
        if any(bool(one.match(name)) is not holds for one, holds in self._ahead):
            return False
        return bool(self._rest.match(name))

    def _read(self, text: str) -> Any:
        import re2  # only checkpoints with patterns need it

        options = re2.Options()
        options.log_errors = False
        try:
            return re2.compile(_AT_MOST.sub(lambda found: found[1] or "{0,", text), options)
        except re2.error as error:
            said = error.args[0]
            self._refuse(f"has what RE2 does not read ({said.decode() if isinstance(said, bytes) else said})")

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(
            f"{self._where}: the pattern {shown(self._text)} {why}, which is not matched here because it could take "
            "without end; write it more simply, or list the names of the modules"
        )


def _group(text: str, begin: int) -> tuple[int, bool]:
    """Where the group ends that `begin` is in, and whether it has alternatives."""
    depth, alternatives, at = 0, False, begin
    for token in _TOKEN.finditer(text, begin):
        at, one = token.start(), token[0]
        if one == ")" and depth == 0:
            return at, alternatives
        depth += (one == "(") - (one == ")")
        alternatives |= one == "|" and depth == 0
    return len(text), alternatives
