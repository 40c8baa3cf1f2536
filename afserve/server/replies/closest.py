"""Which routes an unknown path may have meant: few names, found by likeness."""

import difflib
from collections.abc import Sequence

MOST_NAMED = 3
MOST_CHARACTERS = 128  # of a path that is compared
_LIKE = 0.6
_BASES = ("/v1", "/api")  # what clients put in front of a path once too often, or forget


def closest_routes(path: str, routes: Sequence[str]) -> list[str]:
    """The most like first; empty where none is."""
    asked = path[:MOST_CHARACTERS].rstrip("/") or "/"
    found: list[str] = []
    for base in _BASES:
        for spelled in (base + asked, asked.removeprefix(base), base + asked.replace(base, "")):
            found += [route for route in routes if route == spelled]
    found += difflib.get_close_matches(asked, routes, MOST_NAMED, _LIKE)
    return list(dict.fromkeys(found))[:MOST_NAMED]
