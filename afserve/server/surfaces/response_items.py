"""What a kept response was asked, as OpenAI lists it: each item with a type, an id and a status."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from afserve.server.bodies.messages import TEXT_PARTS

Item = dict[str, object]
_PREFIX = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip
_ANY_PREFIX = "item"


def listed_items(asked: bytes) -> list[Item]:
    """Of the JSON array of a response's input, newest first.

    An item that came without an id, or with that of another, has one of its place and its content: so it is the same
    in each response that goes on with this one.
    """
    taken: set[str] = set()
    found = [_listed(at, dict(item), taken) for at, item in enumerate(json.loads(asked))]
    return found[::-1]


def _listed(at: int, item: Item, taken: set[str]) -> Item:
    kind = str(item.get("type") or "message")
    id = item.get("id")
    if not isinstance(id, str) or not id or id in taken:
        content = hashlib.sha256(f"{at}:{json.dumps(item)}".encode()).hexdigest()
        id = f"{_PREFIX.get(kind, _ANY_PREFIX)}_{content[:48]}"
    taken.add(id)
    item |= {"type": kind, "id": id, "status": item.get("status") or "completed"}
    if kind == "message":
        item["content"] = _content(item.get("content"), said=item.get("role") == "assistant")
    elif kind == "reasoning":
        item["summary"] = item.get("summary") or []
    return item


def _content(content: object, *, said: bool) -> object:
    """Texts as parts; `said` of the model, in the words that the API has for those."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        return []
    return [_part(part, said) for part in content if isinstance(part, Mapping)]


def _part(part: Mapping[str, object], said: bool) -> Mapping[str, object]:
    if part.get("type") not in (*TEXT_PARTS, "output_text"):
        return part
    if not said:
        return {**part, "type": "input_text"}
    return {"annotations": [], **part, "type": "output_text"}
