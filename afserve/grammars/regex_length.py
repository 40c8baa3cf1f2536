"""How long the shortest text of a regular expression is, without compiling it: {1000}{1000} is a million.

Reads what the grammar compiler reads (Rust's syntax). What is no regular expression has some length too; the compiler
says what is wrong with it.
"""

import re

# What is not closed reaches to the end, so that no place is looked at twice.
_TOKEN = re.compile(
    r"\\[pPxuU]\{[^}]*+\}?|\\x[0-9a-fA-F]{2}|\\p.|\\."  # an escape
    r"|\[\^?\]?(?:\\.|\[:\^?\w{1,16}:\]|[^\]\\])*+\]?"  # a set of characters
    r"|\(\?P?<[^>]*+>?|\(\?[a-zA-Z-]*+[:)]?|\("  # a group begins, or a flag is set
    r"|\{\d*+(?:,\d*+)?\}\??|[*+?]\??"  # how often
    r"|.",
    re.DOTALL,
)
MAX_FORCED = 1 << 14  # characters that an answer may have to have
MOST = 1 << 40  # no longer text is told from another
_NOTHING = frozenset(("^", "$", r"\b", r"\B", r"\A", r"\z"))


def shortest_length(pattern: str) -> int:
    """In characters, counted in one pass over `pattern`."""
    open_groups: list[
        tuple[int, int | None]
    ] = []  # before each: its length so far, and its shortest alternative
    length, best, last = 0, None, 0
    for found in _TOKEN.finditer(pattern):
        part = found[0]
        if part.startswith("("):
            if not part.endswith(")"):
                open_groups.append((length, best))
                length, best = 0, None
            last = 0
        elif part == ")":
            inner = length if best is None else min(best, length)
            length, best = open_groups.pop() if open_groups else (0, None)
            length, last = length + inner, inner
        elif part == "|":
            best, length, last = length if best is None else min(best, length), 0, 0
        elif (times := _times(part)) is not None:
            before, last = length - last, min(last * times, MOST)
            length = min(before + last, MOST)
        elif part not in _NOTHING:
            length, last = length + 1, 1
        else:
            last = 0
    return length if best is None else min(best, length)


def too_long(shortest: int, what: str = "text that matches") -> str:
    """Why a pattern, or a schema, with so long a shortest text is refused."""
    return (
        f"the shortest {what} has {shortest} characters or more, at most {MAX_FORCED} are taken; use "
        "smaller repetitions"
    )


def _times(token: str) -> int | None:
    """At least how often a quantifier has what is before it; None for what is none."""
    if token[0] in "*?":
        return 0
    if token[0] == "+":
        return 1
    if len(token) < 3 or token[0] != "{":
        return None
    digits = token[1:].partition(",")[0].rstrip("}?")
    return int(digits[:12]) if digits else 0
