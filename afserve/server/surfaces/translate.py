"""Another API's request as the body of a chat request, and its refusals in that API's own field names."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from afserve.errors import RequestError
from afserve.server.fields import Fields

Body = dict[str, object]
# What other servers take beside their API's own fields, and every API here takes too.
SAMPLING = (
    "model", "seed", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos", "logit_bias", "priority", "cache_salt",
    "deadline", "ttft", "tpot", "service_tier", "chat_template_kwargs", "stream",
)  # fmt: skip


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
            raise RequestError(
                f"{name}: is not supported here; use /v1/chat/completions or /v1/completions", param=name
            )


def copied(fields: Fields, names: Sequence[str] = SAMPLING) -> Body:
    return {name: fields.get(name) for name in names if fields.get(name) is not None}


def append_words(message: Body, words: str) -> None:
    """Below what a message has, as a part of its own: joining many costs what they have."""
    content = message["content"]
    if not isinstance(content, list):
        content = message["content"] = [{"type": "text", "text": content or ""}]
    content.append({"type": "text", "text": f"\n\n{words}"})


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """A refusal inside that names a chat field names the API's own, by the longest name that fits. "[]" is any index:
    with "tools[].function.name" called "tools[].name", tools[3].function.name is tools[3].name."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        found = [beginning for name in names if (beginning := _beginning(param, name, names[name]))]
        if not found:
            raise
        chat, own = max(found, key=lambda pair: len(pair[0]))
        message = error.message.replace(chat, own, 1) if error.message.startswith(chat) else error.message
        raise type(error)(message, param=own + param[len(chat) :]) from error


def _beginning(param: str, chat: str, own: str) -> tuple[str, str] | None:
    """The beginning of `param` that `chat` names, and `own` with the indices that stand there."""
    found = re.match(re.escape(chat).replace(r"\[\]", r"\[(\d+)\]") + r"(?=[.\[]|$)", param)
    if found is None:
        return None
    for index in found.groups():
        own = own.replace("[]", f"[{index}]", 1)
    return found[0], own
