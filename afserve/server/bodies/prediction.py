"""What a client expects as the answer, in OpenAI's words: a draft of it. Knows no engine."""

import re

from afserve.errors import shown
from afserve.server.bodies.declared import PREDICTION
from afserve.server.bodies.fields import Fields
from afserve.server.bodies.messages import text_part

_HALF = re.compile("[\ud800-\udfff]")  # of a character: JSON may carry one, and no text has it


def expected_words(fields: Fields) -> str:
    """Empty where nothing is expected. Raises RequestError that names the field."""
    given = fields.section(PREDICTION)
    if given is None:
        return ""
    kind, content = given.get("type"), given.get("content")
    if not isinstance(kind, str):
        given.refuse_field("type", "content")
    if kind != "content":
        raise given.refusal("type", f"{shown(kind)} is not served, it must be content")
    if isinstance(content, list):
        content = "".join(text_part(part) for part in given.sections("content"))
    if not isinstance(content, str):
        given.refuse_field("content", "a string or an array of text parts")
    if _HALF.search(content):
        raise given.refusal(
            "content", "holds a lone surrogate, which is not valid Unicode; send whole characters"
        )
    return content
