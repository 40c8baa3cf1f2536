"""OpenAI's lists, a page at a time: `after`, `limit` and `order` of a query."""

import re
from collections.abc import Mapping, Sequence

from afserve.errors import RequestError, shown

MOST = 10_000  # of a page, as OpenAI has it for files
Entry = Mapping[str, object]


def page_of(
    entries: Sequence[Entry], query: Mapping[str, str], *, usual: int = MOST, most: int = MOST
) -> dict[str, object]:
    """A page of what comes newest first, of `usual` entries where the query names no limit, at most `most`. Raises
    RequestError that names what the query has wrong."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError.about("order", f"{shown(order)} is neither asc nor desc")
    found = list(entries if order == "desc" else reversed(entries))
    found = found[_begin(found, query.get("after")) :]
    data = found[: _limit(query.get("limit"), usual, most)]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    more = len(found) > len(data)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


def _begin(entries: Sequence[Entry], after: str | None) -> int:
    if after is None:
        return 0
    at = next((i for i, entry in enumerate(entries) if entry["id"] == after), None)
    if at is None:
        raise RequestError.about("after", f"{shown(after)} is not in this list; leave it out to begin anew")
    return at + 1


def _limit(given: str | None, usual: int, most: int) -> int:
    if given is None:
        return usual
    # Longer digits are not read at all: that takes the square of their length.
    limit = int(given) if re.fullmatch("[0-9]{1,5}", given) else 0
    if not 1 <= limit <= most:
        raise RequestError.about("limit", f"{shown(given)} is no number from 1 to {most}")
    return limit
