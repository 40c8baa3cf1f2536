"""The bodies of requests and answers as JSON schemas, with the limits that the server checks. Values only.

Requests are as `bodies/declared.py` declares them, and name what is looked at; other fields are ignored, as long as
they would not change the answer.
"""

from collections.abc import Mapping

from afserve.server.bodies.declared import (
    FLAG,
    MAX_TOKENS,
    MAX_TOOLS,
    MESSAGE,
    NATURAL,
    OBJECT,
    TEXT,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    Schema,
    TokenizeBody,
    arrays,
    objects,
    whole,
)
from afserve.server.surfaces.translate import SAMPLING


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


# What other APIs take beside their own.
_SHARED = {name: ChatBody.declared[name].schema for name in SAMPLING}
_TOOLS = arrays(OBJECT, maxItems=MAX_TOOLS)
_USAGE = objects(
    ("prompt_tokens", "total_tokens"), prompt_tokens=NATURAL, completion_tokens=NATURAL, total_tokens=NATURAL
)


def _kept(kind: str, **more: Schema) -> Schema:
    """What has an id and a kind."""
    return objects(("id", "object", *more), id=TEXT, object={"const": kind}, **more)


def _list(name: str) -> Schema:
    return objects(("object", "data"), object={"const": "list"}, data=arrays(ref(name)))


SCHEMAS: Mapping[str, Schema] = {
    "CompletionRequest": CompletionBody.schema(),
    "ChatRequest": ChatBody.schema(),
    "EmbeddingRequest": EmbeddingBody.schema(),
    "TokenizeRequest": TokenizeBody.schema(),
    "ResponseRequest": objects(
        ("input",), **_SHARED, input={"oneOf": [TEXT, arrays(OBJECT)]}, store=FLAG, tools=_TOOLS
    ),
    "MessageRequest": objects(
        ("messages", "max_tokens"),
        **_SHARED,
        messages=arrays(MESSAGE, minItems=1),
        max_tokens=whole(1, MAX_TOKENS).schema,
        tools=_TOOLS,
    ),
    "OllamaChatRequest": objects(("messages",), messages=arrays(MESSAGE), stream=FLAG, options=OBJECT),
    "OllamaRequest": objects(("prompt",), prompt=TEXT, stream=FLAG, options=OBJECT),
    "OllamaModel": objects(("model",), model=TEXT),
    "OllamaEmbedRequest": objects(("input",), input=TEXT, options=OBJECT),
    "DetokenizeRequest": objects(("tokens",), tokens=arrays(NATURAL)),
    "BatchRequest": objects(
        ("endpoint", "input_file_id"),
        endpoint=TEXT,
        input_file_id=TEXT,
        completion_window={**TEXT, "enum": ["24h"]},
    ),
    "FileForm": objects(("file", "purpose"), file={"type": "string", "format": "binary"}, purpose=TEXT),
    "Any": OBJECT,
    "Text": TEXT,
    "Stream": {"description": "Events, or lines of JSON, until the last says so."},
    "Completion": _kept(
        "text_completion",
        created=NATURAL,
        model=TEXT,
        choices=arrays(objects(("index", "text", "finish_reason"))),
        usage=_USAGE,
    ),
    "Chat": _kept(
        "chat.completion",
        created=NATURAL,
        model=TEXT,
        choices=arrays(objects(("index", "message", "finish_reason"))),
        usage=_USAGE,
    ),
    "Embeddings": objects(
        ("object", "data", "model", "usage"),
        object={"const": "list"},
        data=arrays(objects(("object", "index", "embedding"), embedding={"type": ["array", "string"]})),
        model=TEXT,
        usage=_USAGE,
    ),
    "Response": _kept("response", status=TEXT, output=arrays(OBJECT)),
    "Model": _kept("model", created=NATURAL, owned_by=TEXT, max_model_len=NATURAL),
    "Models": _list("Model"),
    "File": _kept("file", bytes=NATURAL, created_at=NATURAL, filename=TEXT, purpose=TEXT),
    "Files": _list("File"),
    "Batch": _kept("batch", endpoint=TEXT, status=TEXT, request_counts=OBJECT, created_at=NATURAL),
    "Batches": _list("Batch"),
    "Deleted": objects(("id", "deleted"), id=TEXT, deleted={"const": True}),
    "Tokens": objects(
        ("count", "max_model_len", "tokens"), count=NATURAL, max_model_len=NATURAL, tokens=arrays(NATURAL)
    ),
    "Prompt": objects(("prompt",), prompt=TEXT),
    "Error": objects(("error",), error={"type": ["object", "string"]}),
}
