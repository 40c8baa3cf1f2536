"""What every HTTP request passes first: the API key, a request id, the count of its answer."""

import hmac
import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from afserve.errors import AuthError, TooLargeError
from afserve.server.body import ClientGone
from afserve.server.observe import ServerMetrics
from afserve.server.refusal import refusal
from afserve.server.settings import ServerSettings

log = logging.getLogger("afserve.server")
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/"})
CHANGING_PREFIX = "/admin"
ADMIN_PREFIXES = (CHANGING_PREFIX, "/status")


class HeadersTooLargeError(TooLargeError):
    status = 431


class Gate:
    """ASGI middleware. With no keys configured everything is open, as on a loopback address."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._app = app
        both = (*settings.api_keys, *settings.admin_keys) if settings.api_keys else ()
        self._api_keys = tuple(key.encode() for key in both)
        self._admin_keys = tuple(key.encode() for key in settings.admin_keys or settings.api_keys)
        self._admin_configured = bool(settings.admin_keys)
        self._max_header_bytes = settings.max_header_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.responses.add(1, route, str(message["status"]))
            await send(message)

        try:
            self._check_headers(scope)
            self._check_key(scope)
        except (AuthError, TooLargeError) as error:
            await refusal(error)(scope, receive, stamped)
            return
        try:
            await self._app(scope, receive, stamped)
        except ClientGone:
            log.info("%s: the client left, its request was cancelled", request_id)

    def _check_headers(self, scope: Scope) -> None:
        """The parser bounds what it buffers, this bounds what it let through in one piece."""
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_header_bytes:
            raise HeadersTooLargeError(
                f"the headers have {size} bytes, at most {self._max_header_bytes} are accepted"
            )

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"]
        keys = self._admin_keys if path.startswith(ADMIN_PREFIXES) else self._api_keys
        if path.startswith(CHANGING_PREFIX) and not self._admin_configured:
            raise AuthError("this server has no admin key; start it with --admin-key-file to use /admin")
        if not keys or path in OPEN_PATHS:
            return
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not given:
            raise AuthError("an API key is needed: send it as the header Authorization: Bearer KEY")
        if not any(hmac.compare_digest(given.strip().encode(), key) for key in keys):
            raise AuthError("the API key is not one of this server's")
