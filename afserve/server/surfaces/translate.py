"""Another API's request as the body of a chat request, and its refusals in that API's own field names."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from afserve.errors import RequestError
from afserve.server.bodies.declared import SamplingFields, SchedulingFields
from afserve.server.bodies.fields import Fields

Body = dict[str, object]
_LONGEST_NAME = 256
# What other servers take beside their API's own fields, and every API here takes too.
_LEFT_OUT = ("n", "include_stop_str_in_output")
SAMPLING = (
    "model",
    *(name for name in (*SamplingFields.declared, *SchedulingFields.declared) if name not in _LEFT_OUT),
    "chat_template_kwargs",
    "stream",
)


@dataclass(frozen=True, slots=True)
class Translated:
    """`body`: of a chat request, with `raw` of a completion. `facts`: what the answer repeats of the request. `kept`:
    items to store. `names`: what its fields were called in this request, where that depends on it; `also` has
    second names. `whole`: the answer, where there is nothing to compute."""

    body: Body
    facts: Mapping[str, object]
    kept: Sequence[object] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    raw: bool = False
    whole: bytes = b""


def refuse_resume(fields: Fields) -> None:
    """Raises RequestError for a request that is to outlive its connection: these answers cannot."""
    for name in ("resume", "request_id"):
        if fields.get(name) is not None:
            raise RequestError.about(name, "is not supported here; use /v1/chat/completions or completions")


def append_words(message: Body, words: str) -> None:
    """Below what a message has, as a part of its own: joining many costs what they have."""
    content = message["content"]
    if not isinstance(content, list):
        content = message["content"] = [{"type": "text", "text": content or ""}]
    content.append({"type": "text", "text": f"\n\n{words}"})


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """A refusal inside that names a chat field names the API's own."""
    try:
        yield
    except RequestError as error:
        chat, own = _longest(error.param or "", names)
        if not chat:
            raise
        message = error.message.replace(chat, own, 1) if error.message.startswith(chat) else error.message
        raise type(error)(message, param=own_name(error.param or "", names)) from error


def own_name(param: str, names: Mapping[str, str]) -> str:
    """What a chat field is called in another API, by the longest name that fits."""
    chat, own = _longest(param, names)
    return own + param[len(chat) :]


def _longest(param: str, names: Mapping[str, str]) -> tuple[str, str]:
    """The beginning of `param` that has a name, and that name; two "" for none."""
    whole = param[:_LONGEST_NAME]  # a field's own name may be whatever a client has sent
    ends = [at for at, letter in enumerate(whole) if letter in ".["]
    for end in (len(whole), *reversed(ends)):
        chat = param[:end]
        if chat in names:
            return chat, names[chat]
    return "", ""
