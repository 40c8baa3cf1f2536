"""What all sessions have in common: a long system prompt, a question, and a tool whose calls are told at the end."""

import json

SYSTEM = "You look things up, one after the other, and never guess. " * 120
QUESTION = "What is in the five drawers?"
DESCRIPTION = "Looks into a drawer."
SCHEMA = {"type": "object", "properties": {"drawer": {"type": "integer"}}, "required": ["drawer"]}
_calls: list[dict[str, object]] = []


def look(drawer: int) -> str:
    """Looks into a drawer."""
    _calls.append({"drawer": drawer})
    return f"drawer {drawer} has {10 * drawer} spoons, as it did last week"


def show(text: str | None) -> None:
    print(json.dumps({"calls": _calls, "text": text}))
