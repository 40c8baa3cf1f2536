"""Calls that a client sends back, as templates want them: ids in their model's shape, arguments as object and as text.

Templates of Kimi and Mistral show ids to the model, which knows them in one shape only. Kimi's are `functions.NAME:N`,
N counting the calls of a conversation; Mistral's are nine letters and digits.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence

Message = Mapping[str, object]
KIMI, MISTRAL = "kimi", "mistral"
_KIMI = re.compile(r"functions\..+:(\d{1,9})", re.DOTALL)
_MISTRAL = re.compile(r"[a-zA-Z0-9]{9}")


class Arguments(dict[str, object]):
    """An object that is its JSON wherever a template adds it to a text: some of them expect a string."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def call_id(shape: str, name: str, number: int, seed: str) -> str:
    """Of call `number` of its conversation; `seed` and number tell it from all others."""
    if shape == KIMI:
        return f"functions.{name}:{number}"
    digest = hashlib.sha256(f"{seed}-{number}".encode()).hexdigest()
    return digest[:9] if shape == MISTRAL else f"call_{digest[:24]}"


def next_number(messages: Sequence[Message]) -> int:
    """Of the next call of a conversation, also where its beginning was left out."""
    calls = [call for message in messages for call in _calls(message)]
    used = [int(found[1]) + 1 for call in calls if (found := _KIMI.fullmatch(str(call.get("id"))))]
    return max([len(calls), *used])


def as_templates_want(shape: str, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with calls and their results in this shape of ids; what has it already keeps its ids."""
    fits = {KIMI: _KIMI, MISTRAL: _MISTRAL}.get(shape)
    calls = [call for message in messages for call in _calls(message)]
    renames = fits is not None and not all(fits.fullmatch(str(call.get("id"))) for call in calls)
    names: dict[object, str] = {}
    number = iter(range(len(calls)))

    def wanted(call: Message) -> Message:
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            function = {**function, "arguments": Arguments(arguments)}
        at, old = next(number), call.get("id")
        new = call_id(shape, str(function.get("name")), at, str(old)) if renames else old
        if renames and isinstance(old, str):
            names[old] = str(new)
        return {**call, "id": new, "function": function}

    return [_wanted(message, wanted, names) for message in messages]


def _wanted(message: Message, wanted: Callable[[Message], Message], names: Mapping[object, str]) -> Message:
    calls = _calls(message)
    if calls:
        return {**message, "tool_calls": [wanted(call) for call in calls]}
    old = message.get("tool_call_id")
    new = names.get(old) if isinstance(old, str) else None
    return message if new is None else {**message, "tool_call_id": new}


def _calls(message: Message) -> list[Message]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
