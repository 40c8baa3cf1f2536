"""A body of /v1/cache/warm: a prompt, or the beginning of a chat that goes on later."""

from afserve.server.bodies.declared import WarmBody
from afserve.server.bodies.fields import Fields
from afserve.server.surfaces.translate import Body, Translated

SECONDS = 300.0  # that it is kept, where the body does not say


def translate(fields: Fields) -> Translated:
    """One token is drawn, which nobody reads."""
    body: Body = {"retain": SECONDS, **fields.given(*WarmBody.declared), "max_tokens": 1, "temperature": 0}
    if "messages" in body:
        return Translated({**body, "add_generation_prompt": False}, {})
    return Translated(body, {}, raw=True)
