"""What every HTTP request passes first: the names it uses, where it comes from, its key, an id, its count."""

import ipaddress
import logging
import re
import time
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from afserve.errors import AfserveError, TooLargeError, UserError, shown
from afserve.server.access.accounts import STATE, Accounts
from afserve.server.access.key_file import Key
from afserve.server.access.keyring import AccessRules, ForbiddenError
from afserve.server.access.ledger import RateLimitedError
from afserve.server.answers.answering import WATCHED
from afserve.server.http.access_log import REQUEST_ID, Seen, is_kept, named, request_id_of
from afserve.server.http.audit_log import AuditLog
from afserve.server.http.body import ClientGone
from afserve.server.http.connections import CONNECTION, Connections
from afserve.server.http.protocol import offer
from afserve.server.http.settings import ServerSettings
from afserve.server.metrics.observe import HttpMetrics
from afserve.server.metrics.spans import STATE as SPAN
from afserve.server.metrics.spans import Spans
from afserve.server.replies.refusal import refusal

log = logging.getLogger("afserve.server")
FILES_PATH = "/v1/files"  # a form; who may send it is told by its Origin
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Pages that this machine serves may ask, as Ollama has it.
LOCAL_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
# Whose documents show requests without a content type. What a browser sends has one of these headers.
UNTYPED_PREFIX = "/api/"
BROWSERS = ("origin", "sec-fetch-site", "referer")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class HeadersTooLargeError(TooLargeError):
    status = 431


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
        self,
        app: ASGIApp,
        settings: ServerSettings,
        metrics: HttpMetrics,
        connections: Connections,
        accounts: Accounts,
        spans: Spans,
        audit: AuditLog | None = None,
    ) -> None:
        self._app = app
        self._audit = audit
        self._connections = connections
        self._accounts = accounts
        self._spans = spans
        self._door = AccessRules(accounts.ring, open_metrics=settings.open_metrics)
        self._log_prompts = settings.log_prompts
        self._max_header_bytes = settings.max_header_bytes
        self._hosts = settings.hosts
        self._origins = frozenset(origin.lower().rstrip("/") for origin in settings.origins)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state[REQUEST_ID] = request_id = request_id_of(headers.get("x-request-id"))
        span = state[SPAN] = self._spans.begin_span(headers.get("traceparent"))
        began = time.time()
        seen = Seen(self._metrics.clock, self._metrics.clock.now(), self._log_prompts)
        limits: dict[str, str] = {}
        offer(scope, seen)

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = request_id
                answered.update(limits)
                if self._connections.leaving:
                    answered["connection"] = "close"
                self._count(scope, message["status"])
            seen.note_message(message)
            await send(message)

        async with AsyncExitStack() as counted:
            try:
                account = self._accounts.account_for(self._check(scope, headers))
                if scope["method"] == "POST":
                    standing = await counted.enter_async_context(self._accounts.one_more(account))
                    limits.update(standing.headers())
            except AfserveError as error:
                if isinstance(error, RateLimitedError):
                    limits.update(error.standing.headers())
                await refusal(error, scope["path"])(scope, receive, stamped)
                self._write_down(scope, seen, "", began)
                return
            state[STATE] = account
            try:
                await self._app(scope, seen.watching(receive), stamped)
            except ClientGone as gone:
                self._metrics.cancelled.add(1, gone.reason)
                if gone.aborts:
                    scope["state"][CONNECTION].abort()
                log.info("cancelled, the client: %s", gone.reason, extra={REQUEST_ID: request_id})
            except Exception:
                if not seen.status:  # a bug, which is answered outside of here
                    seen.status = 500
                    self._count(scope, seen.status)
                raise
            finally:
                self._write_down(scope, seen, account.owner, began)
                span.end_span(named(scope), began, seen.attributes(request_id), failed=seen.status >= 500)

    def _write_down(self, scope: Scope, seen: Seen, owner: str, began: float) -> None:
        """In the access log, and in the audit log what asks, changes or is refused."""
        audited = self._audit is not None and (scope["method"] not in SAFE_METHODS or seen.status >= 400)
        if not (audited or is_kept()):
            return
        fields = seen.fields(scope, owner)
        if is_kept():
            seen.write_line(scope, fields)
        if self._audit is None or not audited:
            return
        state = scope["state"]
        entry = {"time": round(began, 6), "request_id": state.get(REQUEST_ID, ""), **fields}
        if (watched := state.get(WATCHED)) is not None:
            tokens = {"prompt_tokens": watched.prompt_tokens, "completion_tokens": sum(watched.tokens)}
            entry |= {"model": watched.model, **tokens}
        self._audit.note_request(entry)

    def _count(self, scope: Scope, status: int) -> None:
        self._metrics.responses.add(1, getattr(scope.get("route"), "path", "none"), str(status))

    def _check(self, scope: Scope, headers: Headers) -> Key | None:
        self._check_size(scope)
        self._check_names(scope["method"], headers)
        key = self._door.pass_by(scope["path"], headers)
        self._check_type(scope["method"], scope["path"], headers)
        return key

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
        own = bool(host) and _site_of(origin) == host.lower()
        if not own and not LOCAL_ORIGIN.fullmatch(origin) and origin.lower() not in self._origins:
            raise ForbiddenError(
                f"Origin: {shown(origin)} is another site than this server; start it with --allowed-origin ORIGIN to "
                "let its pages ask"
            )

    def _both_loopback(self, name: str) -> bool:
        return "127.0.0.1" in self._hosts and _is_loopback(name)

    def _check_type(self, method: str, path: str, headers: Headers) -> None:
        """A form of another site cannot be sent as JSON without the browser asking first."""
        if method in SAFE_METHODS:
            return
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return
        packed = headers.get("content-encoding", "identity")
        if packed.lower() != "identity":
            raise MediaTypeError(
                f"Content-Encoding: {shown(packed)}: bodies are sent as they are; leave it out"
            )
        given = headers.get("content-type", "")
        kind = given.partition(";")[0].strip().lower()
        if path.startswith(UNTYPED_PREFIX) and not any(name in headers for name in BROWSERS):
            return
        wanted, what = "application/json", "bodies are JSON"
        if path == FILES_PATH:
            wanted, what = "multipart/form-data", "a file is sent as a form"
        if kind != wanted:
            raise MediaTypeError(
                f"Content-Type: {shown(given)}: {what}; send the header Content-Type: {wanted}"
            )


def _site_of(origin: str) -> str:
    """Its host and port, empty where it is no address: then it is no site of ours."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """Without the port and the brackets of an IPv6 address."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")
