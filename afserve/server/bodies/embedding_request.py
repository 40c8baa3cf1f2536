"""POST /v1/embeddings as a value: what was asked, checked, before any text is tokenized. Knows no HTTP."""

from dataclasses import dataclass

from afserve.errors import RequestError, shown
from afserve.server.bodies.fields import Fields, or_else
from afserve.server.bodies.openai import Prompt, prompts_of
from afserve.server.bodies.unsupported import refuse_unsupported

FORMATS = ("float", "base64")


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    inputs: tuple[Prompt, ...]
    base64: bool
    add_special_tokens: bool


def embedding_request(fields: Fields) -> EmbeddingRequest:
    refuse_unsupported(fields)
    if fields.get("dimensions") is not None:
        raise RequestError(
            "dimensions: this model was not trained to be cut to fewer, so its whole vector is given; leave it out",
            param="dimensions",
        )
    if fields.flag("stream"):
        raise RequestError("stream: vectors come whole; leave it out", param="stream")
    for name in ("resume", "request_id"):
        if fields.get(name) is not None:
            raise RequestError(f"{name}: vectors are not kept; leave it out", param=name)
    wanted = or_else(fields.text("encoding_format"), "float")
    if wanted not in FORMATS:
        raise RequestError(
            f"encoding_format: {shown(wanted)} is none of {', '.join(FORMATS)}", param="encoding_format"
        )
    return EmbeddingRequest(
        prompts_of(fields, "input"),
        wanted == "base64",
        fields.flag("add_special_tokens", True),
    )
