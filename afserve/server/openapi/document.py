"""`/openapi.json`: every route of the application, what it takes and answers. `/docs` is that as a page.

A test compares it with the routes.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from afserve import __version__
from afserve.control.wire.change_values import VERBS
from afserve.server.access.keyring import ADMIN_PREFIXES, OPEN_PATHS
from afserve.server.bodies.changes import schema_of
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


JSON, PLAIN, BYTES, FORM = "application/json", "text/plain", "application/octet-stream", "multipart/form-data"
HTML = "text/html"
EVENTS, LINES = "text/event-stream", "application/x-ndjson"

# Of a server with several models, of ?model=NAME.
_BY_MODEL = ("/ready", "/status", "/live", "/tokenizer_info", "/admin/")


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


_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/"): Operation("The live page.", gives="Text", media=HTML),
    ("POST", "/v1/completions"): Operation(
        "Continue a text.", "CompletionRequest", "Completion", streams=EVENTS
    ),
    ("POST", "/v1/chat/completions"): Operation("Answer a chat.", "ChatRequest", "Chat", streams=EVENTS),
    ("POST", "/v1/embeddings"): Operation("Vectors of texts.", "EmbeddingRequest", "Embeddings"),
    ("POST", "/v1/responses"): Operation(
        "Answer, and keep the answer.", "ResponseRequest", "Response", streams=EVENTS
    ),
    ("GET", "/v1/responses/{response_id}"): Operation("A kept response.", gives="Response"),
    ("DELETE", "/v1/responses/{response_id}"): Operation("Forget a response.", gives="Deleted"),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation("What a response was asked."),
    ("POST", "/v1/files"): Operation("Keep a file.", "FileForm", "File", form=FORM),
    ("GET", "/v1/files"): Operation("Files that are kept.", gives="Files"),
    ("GET", "/v1/files/{file_id}"): Operation("About a file.", gives="File"),
    ("DELETE", "/v1/files/{file_id}"): Operation("Forget a file.", gives="Deleted"),
    ("GET", "/v1/files/{file_id}/content"): Operation("A file.", gives="Text", media=BYTES),
    ("POST", "/v1/batches"): Operation("Answer the lines of a file.", "BatchRequest", "Batch"),
    ("GET", "/v1/batches"): Operation("Batches.", gives="Batches"),
    ("GET", "/v1/batches/{batch_id}"): Operation("About a batch.", gives="Batch"),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation("End a batch.", gives="Batch"),
    ("POST", "/v1/messages"): Operation("Anthropic's chat.", "MessageRequest", streams=EVENTS),
    ("POST", "/v1/messages/count_tokens"): Operation("Tokens of Anthropic's chat.", "MessageRequest"),
    ("POST", "/api/chat"): Operation("Ollama's chat.", "OllamaChatRequest", streams=LINES),
    ("POST", "/api/generate"): Operation("Ollama's completion.", "OllamaRequest", streams=LINES),
    ("GET", "/api/tags"): Operation("The models in Ollama's words."),
    ("GET", "/api/ps"): Operation("The models that are loaded, which are all."),
    ("POST", "/api/show"): Operation("About a model.", "OllamaModel"),
    ("POST", "/api/embed"): Operation("Vectors of texts.", "OllamaEmbedRequest"),
    ("POST", "/api/embeddings"): Operation("The vector of a text.", "OllamaRequest"),
    ("GET", "/api/version"): Operation("The version in Ollama's words."),
    ("GET", "/v1/requests/{id}"): Operation("About a request that runs or is kept."),
    ("DELETE", "/v1/requests/{id}"): Operation("End a request that runs or is kept."),
    ("GET", "/v1/requests/{id}/events"): Operation("Go on with its stream.", gives="Stream", media=EVENTS),
    ("GET", "/v1/requests/{id}/answer"): Operation("Its whole answer."),
    ("GET", "/v1/models"): Operation("The models.", gives="Models"),
    ("GET", "/v1/models/{name}"): Operation("About a model.", gives="Model"),
    ("POST", "/tokenize"): Operation("Tokens of a text or chat.", "TokenizeRequest", "Tokens"),
    ("POST", "/detokenize"): Operation("Text of tokens.", "DetokenizeRequest", "Prompt"),
    ("GET", "/tokenizer_info"): Operation("Special tokens and chat template."),
    ("GET", "/ping"): Operation("Whether this gateway answers, as some platforms ask."),
    ("GET", "/docs"): Operation("This document as a page.", gives="Text", media=HTML),
    ("GET", "/health"): Operation("Whether this gateway answers."),
    ("GET", "/ready"): Operation("Whether requests are taken."),
    ("GET", "/load"): Operation("Requests that are being answered."),
    ("GET", "/version"): Operation("The version."),
    ("GET", "/metrics"): Operation("For Prometheus.", gives="Text", media=PLAIN),
    ("GET", "/openapi.json"): Operation("This document."),
    ("GET", "/status"): Operation("The nodes."),
    ("GET", "/live"): Operation("A frame a second of the nodes, for the page.", gives="Text", media=EVENTS),
    ("GET", "/static/{name}"): Operation("A file of the page.", gives="Text", media=PLAIN),
    ("GET", "/admin/placement"): Operation("The placement in force."),
    ("POST", "/admin/placement"): Operation("Go to another placement.", "Any", status=202),
    ("POST", "/admin/routing/start"): Operation("Record routing counts."),
    ("POST", "/admin/routing/stop"): Operation("End the recording and get it.", gives="Text", media=BYTES),
    ("GET", "/admin/routing/dump"): Operation("What was recorded so far.", gives="Text", media=BYTES),
}


def operations() -> dict[tuple[str, str], Operation]:
    """By method and path; a change of the deployment is described by its declaration."""
    changes = {
        ("POST", verb.path): Operation(verb.summary, verb.name.capitalize(), status=202)
        for verb in VERBS.values()
    }
    return _OPERATIONS | changes


_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


def described(routes: Sequence[Route]) -> list[Route]:
    """The routes of the document, as JSON and as a page. It has all routes, and these."""

    async def answer(request: Request) -> Response:
        return Response(text, media_type=JSON)

    async def answer_page(request: Request) -> Response:
        return Response(page, media_type=HTML, headers=_PAGE_HEADERS)

    own = [
        Route("/openapi.json", answer, methods=["GET"]),
        Route("/docs", answer_page, methods=["GET"]),
    ]
    whole = document([*routes, *own])
    text, page = json.dumps(whole), guide(whole)
    return own


def document(routes: Iterable[Route]) -> dict[str, object]:
    """OpenAPI 3.1. A route that has no row above is left out, and a test says so."""
    paths: dict[str, dict[str, object]] = {}
    known = operations()
    changes = {verb.name.capitalize(): schema_of(verb) for verb in VERBS.values()}
    for route in routes:
        path = path_of(route)
        for method in route.methods or ():
            operation = known.get((method, path))
            if operation is not None:
                paths.setdefault(path, {})[method.lower()] = _operation(path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "afserve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**SCHEMAS, **changes},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def path_of(route: Route) -> str:
    """As OpenAPI spells it: without the kind of a placeholder."""
    return re.sub(r":\w+\}", "}", route.path)


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
