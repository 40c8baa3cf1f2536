"""A body of /v1/cache/warm: a prompt, or the beginning of a chat that goes on later."""

from afserve.errors import RequestError
from afserve.server.bodies.declared import WarmBody
from afserve.server.bodies.fields import Fields
from afserve.server.surfaces.translate import Body, Translated

SECONDS = 300.0  # that it is kept, where the body does not say
_OF_CHATS = ("tools", "chat_template_kwargs")
# What other APIs call the beginning of a chat.
_ELSEWHERE = {"system": "put it into messages, as the first one", "input": "send a prompt, or messages"}


def translate(fields: Fields) -> Translated:
    """One token is drawn, which nobody reads. Raises RequestError for what would not stand in front of the answer."""
    given = fields.given(*WarmBody.declared)
    for name, instead in _ELSEWHERE.items():
        if fields.get(name) is not None:
            raise RequestError.about(name, f"is not read here; {instead}")
    if ("prompt" in given) is ("messages" in given):
        both = "prompt" in given
        raise RequestError.about(
            "prompt", f"{'and messages are both there' if both else 'is missing'}; send one of both"
        )
    if "prompt_cache_retention" not in given:
        given = {"retain": SECONDS, **given}
    body: Body = {**given, "max_tokens": 1, "temperature": 0}
    if "messages" in body:
        return Translated({**body, "add_generation_prompt": False}, {})
    for name in _OF_CHATS:
        if name in given:
            raise RequestError.about(name, "stands in a chat only; send messages, or leave it out")
    return Translated(body, {}, raw=True)
