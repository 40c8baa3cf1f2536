"""What every HTTP request passes first: the names it uses, where it comes from, its key, an id, its count."""

import hmac
import ipaddress
import logging
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from afserve.errors import AuthError, TooLargeError, UserError, shown
from afserve.server.body import ClientGone
from afserve.server.connections import CONNECTION, Connections
from afserve.server.observe import ServerMetrics
from afserve.server.refusal import refusal
from afserve.server.settings import ServerSettings

log = logging.getLogger("afserve.server")
OPEN_PATHS = frozenset({"/health", "/ready", "/"})
METRICS_PATHS = frozenset({"/metrics"})
CHANGING_PREFIX = "/admin"
ADMIN_PREFIXES = (CHANGING_PREFIX, "/status")
FILES_PATH = "/v1/files"  # a form; who may send it is told by its Origin
ANTHROPIC_PREFIX = "/v1/messages"  # whose clients send the key in a header of its own
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class HeadersTooLargeError(TooLargeError):
    status = 431


class ForbiddenError(UserError):
    """A name that is not this server's, or a web page that may not ask it."""

    status = 403
    kind = "permission_error"


class MediaTypeError(UserError):
    status = 415


def hosts_of(bound: str, allowed: tuple[str, ...]) -> frozenset[str]:
    """The names by which a server may be called: those of the loopback where it listens there, else any.

    A page whose name suddenly means 127.0.0.1 calls it by that page's name; that is how it is told.
    """
    if not allowed and not _is_loopback(bound):
        return frozenset()
    own = LOOPBACK if _is_loopback(bound) else frozenset({bound.lower()})
    return own | {bound.lower()} | {name.lower().strip("[]") for name in allowed}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Gate:
    """ASGI middleware. With no keys configured everything is open, as on a loopback address."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics, connections: Connections
    ) -> None:
        self._app = app
        self._connections = connections
        both = (*settings.api_keys, *settings.admin_keys) if settings.api_keys else ()
        self._api_keys = tuple(key.encode() for key in both)
        self._admin_keys = tuple(key.encode() for key in settings.admin_keys or settings.api_keys)
        self._admin_configured = bool(settings.admin_keys)
        self._open = OPEN_PATHS | METRICS_PATHS if settings.open_metrics else OPEN_PATHS
        self._max_header_bytes = settings.max_header_bytes
        self._hosts = settings.hosts
        self._origins = frozenset(origin.lower().rstrip("/") for origin in settings.origins)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if self._connections.leaving:
                    headers["connection"] = "close"
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.responses.add(1, route, str(message["status"]))
            await send(message)

        try:
            self._check(scope, Headers(scope=scope))
        except UserError as error:
            await refusal(error, scope["path"])(scope, receive, stamped)
            return
        try:
            await self._app(scope, receive, stamped)
        except ClientGone as gone:
            self._metrics.cancelled.add(1, gone.reason)
            if gone.aborts:
                scope["state"][CONNECTION].abort()
            log.info("%s: cancelled, the client: %s", request_id, gone.reason)

    def _check(self, scope: Scope, headers: Headers) -> None:
        self._check_size(scope)
        self._check_names(scope["method"], headers)
        self._check_key(scope["path"], headers)
        self._check_type(scope["method"], scope["path"], headers)

    def _check_size(self, scope: Scope) -> None:
        """The parser bounds what it buffers, this bounds what it let through in one piece."""
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_header_bytes:
            raise HeadersTooLargeError(
                f"the headers have {size} bytes, at most {self._max_header_bytes} are accepted"
            )

    def _check_names(self, method: str, headers: Headers) -> None:
        """Against pages of other sites: whose name was made to mean this server, or that send it forms."""
        host = headers.get("host", "")
        name = _host_name(host)
        if self._hosts and name and name not in self._hosts and not self._both_loopback(name):
            raise ForbiddenError(
                f"Host: {shown(name)} is not a name of this server; start it with --allowed-host NAME to serve it"
            )
        origin = headers.get("origin")
        if origin is None or method in SAFE_METHODS:
            return
        if urlsplit(origin).netloc.lower() != host.lower() and origin.lower() not in self._origins:
            raise ForbiddenError(
                f"Origin: {shown(origin)} is another site than this server; start it with --allowed-origin ORIGIN to "
                "let its pages ask"
            )

    def _both_loopback(self, name: str) -> bool:
        return "127.0.0.1" in self._hosts and _is_loopback(name)

    def _check_key(self, path: str, headers: Headers) -> None:
        keys = self._admin_keys if path.startswith(ADMIN_PREFIXES) else self._api_keys
        if path.startswith(CHANGING_PREFIX) and not self._admin_configured:
            raise AuthError("this server has no admin key; start it with --admin-key-file to use /admin")
        if not keys or path in self._open:
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        if path.startswith(ANTHROPIC_PREFIX) and "x-api-key" in headers:
            kind, given = "bearer", headers["x-api-key"]
        if kind.lower() != "bearer" or not given:
            raise AuthError("an API key is needed: send it as the header Authorization: Bearer KEY")
        if not any(hmac.compare_digest(given.strip().encode(), key) for key in keys):
            raise AuthError("the API key is not one of this server's")

    def _check_type(self, method: str, path: str, headers: Headers) -> None:
        """A form of another site cannot be sent as JSON without the browser asking first."""
        if method in SAFE_METHODS:
            return
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return
        given = headers.get("content-type", "")
        kind = given.partition(";")[0].strip().lower()
        if kind != ("multipart/form-data" if path == FILES_PATH else "application/json"):
            raise MediaTypeError(
                f"Content-Type: {shown(given)}: bodies are JSON; send the header Content-Type: application/json"
            )


def _host_name(host: str) -> str:
    """Without the port and the brackets of an IPv6 address."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")
