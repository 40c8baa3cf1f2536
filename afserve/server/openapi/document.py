"""`/openapi.json`: every route of the application, what it takes and answers. `/docs` is that as a page."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from afserve import __version__
from afserve.control.wire.change_values import VERBS
from afserve.server.access.keyring import ADMIN_PREFIXES, OPEN_PATHS
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
    WarmBody,
    arrays,
    objects,
    whole,
)
from afserve.server.endpoints.admin import schema_of
from afserve.server.openapi.guide import guide
from afserve.server.surfaces.translate import SAMPLING

# Of requests as `bodies/declared.py` declares them, with what is looked at; other fields are ignored, as long as they
# would not change the answer.


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


# What other APIs take beside their own.
_SHARED = {name: ChatBody.declared[name].schema for name in SAMPLING}
_TOOLS = arrays(OBJECT, maxItems=MAX_TOOLS)
_USAGE = objects(
    ("prompt_tokens", "total_tokens"), prompt_tokens=NATURAL, completion_tokens=NATURAL, total_tokens=NATURAL
)
_ROUTED = objects(
    ("data", "dtype", "shape"),
    data=TEXT,
    dtype={"enum": ["uint8", "uint16", "uint32"]},
    shape=arrays(NATURAL),
)


def _kept(kind: str, **more: Schema) -> Schema:
    return objects(("id", "object", *more), id=TEXT, object={"const": kind}, **more)


def _list(name: str) -> Schema:
    return objects(("object", "data"), object={"const": "list"}, data=arrays(ref(name)))


SCHEMAS: Mapping[str, Schema] = {
    "CompletionRequest": CompletionBody.schema(),
    "ChatRequest": ChatBody.schema(),
    "EmbeddingRequest": EmbeddingBody.schema(),
    "WarmRequest": WarmBody.schema(),
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
    "ElasticSize": objects(
        ("new_data_parallel_size",), new_data_parallel_size=NATURAL, drain_timeout=NATURAL
    ),
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
        choices=arrays(objects(("index", "text", "finish_reason"), routed_experts=_ROUTED)),
        usage=_USAGE,
    ),
    "Chat": _kept(
        "chat.completion",
        created=NATURAL,
        model=TEXT,
        choices=arrays(objects(("index", "message", "finish_reason"), routed_experts=_ROUTED)),
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


JSON, PLAIN, BYTES, FORM = "application/json", "text/plain", "application/octet-stream", "multipart/form-data"
HTML = "text/html"
EVENTS, LINES = "text/event-stream", "application/x-ndjson"

# Of a server with several models, of ?model=NAME.
_BY_MODEL = (
    "/ready",
    "/status",
    "/live",
    "/tokenizer_info",
    "/admin/",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
)


@dataclass(frozen=True, slots=True)
class Operation:
    """`takes` and `gives` name schemas. `streams` is the media type of a stream that may come instead."""

    summary: str
    takes: str = ""
    gives: str = "Any"
    media: str = JSON
    streams: str = ""
    form: str = JSON
    status: int = 200


_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


class DocumentedRoutes:
    """The routes of the application, each with what the document says of it."""

    def __init__(self) -> None:
        self._routes: list[Route] = []
        self._paths: dict[str, dict[str, object]] = {}

    def add_route(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Any],
        summary: str,
        takes: str = "",
        gives: str = "Any",
        **more: Any,
    ) -> None:
        """`takes` and `gives` name schemas; `more` is of `Operation`."""
        self._routes.append(Route(path, endpoint, methods=[method]))
        plain = re.sub(r":\w+\}", "}", path)  # OpenAPI knows no kinds of placeholders
        operation = Operation(summary, takes, gives, **more)
        self._paths.setdefault(plain, {})[method.lower()] = _operation(plain, operation)

    def adders(self) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
        """Of routes that are got, posted to, deleted."""
        return (
            partial(self.add_route, "GET"),
            partial(self.add_route, "POST"),
            partial(self.add_route, "DELETE"),
        )

    def described(self) -> Sequence[Route]:
        """All of them, and those of the document itself, as JSON and as a page."""

        async def answer(request: Request) -> Response:
            return Response(text, media_type=JSON)

        async def answer_page(request: Request) -> Response:
            return Response(page, media_type=HTML, headers=_PAGE_HEADERS)

        self.add_route("GET", "/openapi.json", answer, "This document.")
        self.add_route("GET", "/docs", answer_page, "This document as a page.", gives="Text", media=HTML)
        whole = self._document()
        text, page = json.dumps(whole), guide(whole)
        return self._routes

    def _document(self) -> dict[str, object]:
        changes = {verb.name.capitalize(): schema_of(verb) for verb in VERBS.values()}
        return {
            "openapi": "3.1.0",
            "info": {"title": "afserve", "version": __version__},
            "paths": self._paths,
            "components": {
                "schemas": {**SCHEMAS, **changes},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }


def _operation(path: str, operation: Operation) -> dict[str, object]:
    answers: dict[str, object] = {operation.media: {"schema": ref(operation.gives)}}
    if operation.streams:
        answers[operation.streams] = {"schema": ref("Stream")}
    said: dict[str, object] = {
        "summary": operation.summary,
        "tags": ["admin" if path.startswith(ADMIN_PREFIXES) else "api"],
        "security": [] if path in OPEN_PATHS else [{"key": []}, {}],
        "responses": {
            str(operation.status): {"description": operation.summary, "content": answers},
            "default": {"description": "Refused, and why.", "content": {JSON: {"schema": ref("Error")}}},
        },
    }
    text: Schema = {"type": "string", "minLength": 1}
    parameters: list[object] = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if path.startswith(_BY_MODEL) and path not in [verb.path for verb in VERBS.values() if verb.whole_run]:
        parameters.append({"name": "model", "in": "query", "required": False, "schema": text})
    if parameters:
        said["parameters"] = parameters
    if operation.takes:
        content = {operation.form: {"schema": ref(operation.takes)}}
        said["requestBody"] = {"required": True, "content": content}
    return said
