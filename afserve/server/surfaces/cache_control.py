"""Anthropic's `cache_control`: where a client marks the end of what it will send again, and for how long."""

from collections.abc import Iterator

from afserve.errors import RequestError, shown
from afserve.server.bodies.fields import Fields, or_else
from afserve.server.bodies.nvext import TTL_SECONDS

MOST_BREAKPOINTS = 4
_NAME = "cache_control"


def retention_of(fields: Fields) -> float:
    """Seconds that the prompt is to be kept for: the longest of its marks; 0 without one. Blocks are kept whole, the
    ones behind the last mark too. Raises RequestError that names the mark."""
    seconds = 0.0
    for count, (place, mark) in enumerate(_marks(fields), 1):
        if count > MOST_BREAKPOINTS:
            raise RequestError.about(
                place,
                f"is the {count}th mark of the request, at most {MOST_BREAKPOINTS} are allowed; remove one",
            )
        seconds = max(seconds, _seconds(place, mark))
    return seconds


def _seconds(place: str, mark: object) -> float:
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral":
        raise RequestError.about(place, f'{shown(mark)} is not an object with "type": "ephemeral"')
    ttl = or_else(mark.get("ttl"), "5m")
    if not isinstance(ttl, str) or ttl not in TTL_SECONDS:
        raise RequestError.about(f"{place}.ttl", f"{shown(ttl)} is none of {', '.join(TTL_SECONDS)}")
    return TTL_SECONDS[ttl]


def _marks(fields: Fields) -> Iterator[tuple[str, object]]:
    """In the order of the prompt, each with its path; the request's own comes last."""
    body = fields.raw()
    yield from _of_blocks("tools", body.get("tools"))
    yield from _of_blocks("system", body.get("system"))
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            yield from _of_blocks(f"messages[{index}].content", message.get("content"))
    if body.get(_NAME) is not None:
        yield _NAME, body[_NAME]


def _of_blocks(place: str, blocks: object) -> Iterator[tuple[str, object]]:
    for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
        if not isinstance(block, dict):
            continue
        own = f"{place}[{index}]"
        if block.get(_NAME) is not None:
            yield f"{own}.{_NAME}", block[_NAME]
        if block.get("type") == "tool_result":
            yield from _of_blocks(f"{own}.content", block.get("content"))
