"""What a body is for, and who translates those of other APIs to a chat request."""

from collections.abc import Callable, Mapping
from enum import IntEnum

from afserve.server.bodies.fields import Fields
from afserve.server.surfaces import anthropic, ollama, responses, warm
from afserve.server.surfaces.translate import Translated


class BodyKind(IntEnum):
    """What a body is for. Kept answers say it by number."""

    COMPLETION = 1
    CHAT = 2
    TOKENIZE = 3
    DETOKENIZE = 4
    RESPONSE = 12
    FOLLOWING = 13  # a response, with what was said before
    MESSAGE = 14
    OLLAMA_CHAT = 15
    OLLAMA_GENERATE = 16
    MESSAGE_COUNT = 17
    EMBEDDING = 18
    TOKENIZER = 20
    OLLAMA_EMBED = 21
    WARM = 22
    NEXT_TURN = 23  # the gateway's own: a chat and its answer, for what is certain of the next one


def _following(fields: Fields) -> Translated:
    asked, before = fields.section("asked"), fields.array("before")
    assert asked is not None and before is not None, "the gateway puts both there"
    return responses.translate(Fields(asked.raw(), passed=fields.passed), list(before))


# Who translates a body, and what chat fields are called there.
TRANSLATED: Mapping[BodyKind, tuple[Callable[[Fields], Translated], Mapping[str, str]]] = {
    BodyKind.RESPONSE: (lambda fields: responses.translate(fields, []), responses.NAMES),
    BodyKind.FOLLOWING: (_following, responses.NAMES),
    BodyKind.MESSAGE: (anthropic.translate, anthropic.NAMES),
    BodyKind.MESSAGE_COUNT: (anthropic.translate_count, anthropic.NAMES),
    BodyKind.OLLAMA_CHAT: (ollama.translate_chat, ollama.NAMES),
    BodyKind.OLLAMA_GENERATE: (ollama.translate_generate, ollama.NAMES),
    BodyKind.WARM: (warm.translate, {}),
}
# Those that a conversation goes on with.
TURNS = (BodyKind.CHAT, BodyKind.RESPONSE, BodyKind.FOLLOWING, BodyKind.MESSAGE, BodyKind.OLLAMA_CHAT)
