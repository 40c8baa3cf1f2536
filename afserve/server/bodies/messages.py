"""Chat messages as a template wants them: text content as one string, tool arguments as objects."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from afserve.errors import RequestError, shown
from afserve.server.bodies.declared import MAX_MESSAGES
from afserve.server.bodies.fields import Fields
from afserve.server.bodies.unsupported import KnownField, refuse_known

TEXT_PARTS = ("text", "input_text", "refusal")
PICTURE = "image_url"
REASONING = ("reasoning_content", "thinking", "reasoning")
_NOT_SHOWN = {
    "function_call": KnownField(dict, "use tool_calls"),
    "audio": KnownField(dict, "this model reads text only"),
}


def picture_part(url: object) -> Mapping[str, object]:
    """A chat's part of content, for a picture that came by another API."""
    return {"type": PICTURE, "image_url": {"url": url}}


class PicturePart(dict[str, object]):
    """A picture as templates know it; `fields` are the part of content that it came as."""

    def __init__(self, fields: Fields) -> None:
        super().__init__(type="image")
        self.fields = fields


def messages_of(fields: Fields) -> tuple[Mapping[str, object], ...]:
    fields.entries("messages", MAX_MESSAGES)
    messages = fields.sections("messages")
    if not messages:
        raise RequestError.about("messages", "at least one message is needed")
    return tuple(_message(message) for message in messages)


def _message(message: Fields) -> Mapping[str, object]:
    role = message.text("role")
    if not role:
        message.refuse_field("role", "a string such as user, assistant or system")
    refuse_known(message, _NOT_SHOWN)
    plain: dict[str, object] = {
        **_reasoning(message),
        **message.raw(),
        "role": role,
        "content": _content(message),
    }
    if message.get("tool_calls") is not None:
        plain["tool_calls"] = [_tool_call(call) for call in message.sections("tool_calls")]
    return plain


def _reasoning(message: Fields) -> Mapping[str, object]:
    """Under the names that templates read, whichever of them a client sends, as in transformers."""
    told = [text for name in REASONING if isinstance(text := message.get(name), str)]
    return dict.fromkeys(("reasoning_content", "thinking"), told[0]) if told else {}


def _content(message: Fields) -> str | list[Mapping[str, object]] | None:
    """The text of a message; array-form content is the texts of its parts, one after the other. What a user says may
    have pictures: then it is a list of parts as templates know them."""
    value = message.get("content")
    if isinstance(value, list):
        parts = message.sections("content")
        first = next((part for part in parts if part.get("type") == PICTURE), None)
        if first is None:
            return "".join(text_part(part) for part in parts)
        if message.get("role") != "user":
            raise first.refusal("type", "pictures are read in a user's messages alone; send it in one")
        return [
            PicturePart(part) if part.get("type") == PICTURE else {"type": "text", "text": text_part(part)}
            for part in parts
        ]
    if value is None and message.get("role") == "user":
        message.refuse_field("content", "a string or an array of text parts")
    return message.text("content")


def pictures_of(messages: Sequence[Mapping[str, object]]) -> Sequence[Fields]:
    """The parts of content that are pictures, in order."""
    contents = (message["content"] for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part.fields for part in parts if isinstance(part, PicturePart)]


def not_read(kind: object) -> str:
    """Why a part or an item of this type is refused."""
    return f"{shown(kind)} is not served, this model reads text only"


def text_part(part: Fields, kinds: Sequence[str] = TEXT_PARTS) -> str:
    """The words of a part of content. Raises RequestError for one that is none of these `kinds`."""
    kind = part.text("type")
    if kind not in kinds:
        raise part.refusal("type", not_read(kind))
    text = part.text("refusal" if kind == "refusal" else "text")
    if text is None:
        part.refuse_field("text", "a string")
    return text


def _tool_call(call: Fields) -> Mapping[str, object]:
    """Templates want the arguments as an object, clients send them back as the text that they received."""
    function = call.section("function")
    if function is None:
        call.refuse_field("function", "an object")
    given = function.get("arguments")
    if given is not None and not isinstance(given, str | dict):
        function.refuse_field("arguments", "a string, the JSON of an object")
    arguments = given if isinstance(given, dict) else object_of(given or "")
    return {**call.raw(), "function": {**function.raw(), "arguments": arguments}}


DEEPEST = 500  # what goes deeper is no call's arguments
_CLOSES = {"{": "}", "[": "]"}
# A string as far as it goes, with its last quote if it has one; or what gives the text its structure.
_PARTS = re.compile(r'"(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+("?)|[{}\[\],]', re.DOTALL)
_HALF_A_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")


def object_of(text: str) -> dict[str, object]:
    """The object that the arguments of a call spell, as a client sends them back. One that was cut has what was whole
    of it, and its last string as far as it goes; what is no object, nor the beginning of one, is the value of
    `arguments`."""
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
