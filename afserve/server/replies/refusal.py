"""Errors as HTTP: the status, the OpenAI error body, Retry-After. One place decides what a client reads.

What is said of a request's own fields is told as it is. What happened inside is the operator's: of an unexpected
exception, a checkpoint, another process or received bytes a client learns that it happened, and the log has the rest.
"""

import difflib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from afserve.errors import (
    AfserveError,
    AuthError,
    CapacityError,
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    ModelError,
    NotFoundError,
    OverloadedError,
    PeerError,
    PeerLost,
    RendezvousError,
    UserError,
    shown,
)
from afserve.server.bodies.prepared import ContextLengthError
from afserve.server.http.access_log import REQUEST_ID, named

log = logging.getLogger("afserve.server")
MOST_NAMED = 3
MOST_CHARACTERS = 128  # of a path that is compared
_LIKE = 0.6
_BASES = ("/v1", "/api")  # what clients put in front of a path once too often, or forget
BUG = "afserve failed on this request; its log has the reason"
# What is said of errors whose messages are the operator's; of all others that are neither of these nor a user's, BUG.
_WITHHELD: dict[type[AfserveError], str] = {
    CheckpointError: "the model's files cannot be used; the server's log has the reason",
    DoesNotFitError: "the model needs more memory than there is; the server's log has the reason",
    RendezvousError: "nodes disagree about what is served; the server's log has the reason",
}
_SPOKEN = (CapacityError, ConfigError, PeerError, ModelError)
_PID = re.compile(r" ?\(pid \d+\)| ?\bpid \d+")
# With a folder in front of it or at the root; the server's own routes are no files.
_FILE = re.compile(r"(?<![\w/])(?!/(?:v1|api|admin|ready|health|status|live)\b)[\w.~@+-]*(?:/[\w.~@+-]+)+/?")
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class UnknownRouteError(NotFoundError):
    """No path of this server."""


class MethodError(UserError):
    """A path that is there, asked for in another way."""

    status = 405


def error_body(error: AfserveError) -> dict[str, object]:
    return _body(_told(error), error.kind, error.param, code_of(error))


def told(error: AfserveError | None) -> str:
    """What a client is told; None is a bug."""
    return BUG if error is None else _told(error)


def anthropic_body(error: AfserveError | None) -> dict[str, object]:
    status = 500 if error is None else error.status
    kind = ANTHROPIC_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": told(error)}}


def ollama_body(error: AfserveError | None) -> dict[str, object]:
    return {"error": told(error)}


def body_for(path: str, error: AfserveError | None) -> dict[str, object]:
    """In the words of the API that a path belongs to; None is a bug."""
    if path.startswith("/v1/messages"):
        return anthropic_body(error)
    if path == "/api" or path.startswith("/api/"):
        return ollama_body(error)
    return internal_error() if error is None else error_body(error)


def _told(error: AfserveError) -> str:
    """The message, without what is the operator's alone: a lost node's last words may show paths and code."""
    if isinstance(error, PeerLost):
        return f"{error.peer}: this node was lost while it was needed; send the request again"
    words = _words(error)
    if words != error.message:
        log.warning("what a client is not told: %s", error.message)
    return words


def _words(error: AfserveError) -> str:
    for kind, words in _WITHHELD.items():
        if isinstance(error, kind):
            return words
    if isinstance(error, _SPOKEN):
        return _FILE.sub("a file", _PID.sub("", error.message.partition("\n")[0]))
    return error.message if isinstance(error, UserError) else BUG


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def code_of(error: AfserveError) -> str | None:
    """The codes that OpenAI clients look at."""
    if isinstance(error, ContextLengthError):
        return "context_length_exceeded"
    if isinstance(error, NotFoundError) and error.param == "model":
        return "model_not_found"
    if isinstance(error, AuthError):
        return "invalid_api_key"
    if isinstance(error, OverloadedError) and error.status == 429:
        return "rate_limit_exceeded"
    return None


def refusal(error: AfserveError, path: str = "") -> Response:
    headers = {}
    if error.status in (429, 503):
        seconds = error.retry_after if isinstance(error, OverloadedError) else 1.0
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413, 431):
        headers["connection"] = "close"
    return json_response(body_for(path, error), error.status, headers)


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # ASCII escapes, because an error may quote text that UTF-8 cannot carry (a lone surrogate).
    try:
        text = json.dumps(body, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(body))
    return Response(text, status, headers, "application/json")


def _finite(value: object) -> object:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


async def on_afserve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AfserveError)
    if error.status >= 500:
        # A prober asks /ready until it is: that is not news.
        level = logging.DEBUG if request.url.path == "/ready" else logging.WARNING
        log.log(level, "%s: %s", named(request.scope), error.message, extra=_id(request))
    return refusal(error, request.url.path)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in the same shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        refused: UserError = MethodError(f"{shown(path)} does not take {request.method}")
    else:
        refused = UnknownRouteError(f"there is no {request.method} {shown(path)}; {_instead(request, path)}")
    answer = refusal(refused, path)
    answer.headers.update(error.headers or {})
    return answer


def _instead(request: Request, path: str) -> str:
    routes = [route.path for route in request.app.routes if isinstance(route, Route)]
    names = _closest_routes(path, routes)
    return f"see {', '.join(names)}" if names else "GET /docs lists what there is"


def internal_error() -> dict[str, object]:
    return _body(BUG, AfserveError.kind, None, None)


def _closest_routes(path: str, routes: Sequence[str]) -> list[str]:
    """Those that an unknown path may have meant, the most like first."""
    asked = path[:MOST_CHARACTERS].rstrip("/") or "/"
    found: list[str] = []
    for base in _BASES:
        for spelled in (base + asked, asked.removeprefix(base), base + asked.replace(base, "")):
            found += [route for route in routes if route == spelled]
    found += difflib.get_close_matches(asked, routes, MOST_NAMED, _LIKE)
    return list(dict.fromkeys(found))[:MOST_NAMED]


def _id(request: Request) -> dict[str, str]:
    return {REQUEST_ID: request.scope.get("state", {}).get(REQUEST_ID, "")}


async def on_bug(request: Request, error: Exception) -> Response:
    log.error("%s: a bug, see below", named(request.scope), extra=_id(request))
    return json_response(body_for(request.url.path, None), 500, {"connection": "close"})
