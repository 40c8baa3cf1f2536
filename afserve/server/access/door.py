"""Which key a path needs. Health, readiness and the page hold no data: they need none."""

from starlette.datastructures import Headers

from afserve.errors import AuthError, UserError
from afserve.server.access.key_file import Key, KeyRole
from afserve.server.access.keyring import Keyring

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/", "/docs"})
PAGE_PREFIX = "/static/"
METRICS_PATH = "/metrics"
CHANGING_PREFIX = "/admin"
ADMIN_PREFIXES = (CHANGING_PREFIX, "/status", "/live")
ANTHROPIC_PREFIX = "/v1/messages"  # whose clients send the key in a header of its own
_ANYBODY: frozenset[KeyRole] = frozenset()
_BOTH = frozenset({KeyRole.USER, KeyRole.ADMIN})


class ForbiddenError(UserError):
    """A key that does not open this, a name that is not this server's, or a web page that may not ask it."""

    status = 403
    kind = "permission_error"


class Door:
    """With no keys everything is open, as on a loopback address."""

    def __init__(self, ring: Keyring, *, open_metrics: bool) -> None:
        self._ring, self._open_metrics = ring, open_metrics

    def pass_by(self, path: str, headers: Headers) -> Key | None:
        """The key that was sent, None where none is needed. Raises AuthError and ForbiddenError."""
        self._ring.read_changes()
        if path.startswith(CHANGING_PREFIX) and not self._ring.has_admins:
            raise AuthError(
                "this server has no admin key; start it with --admin-key-file, or make one for its --api-keys file "
                "with `afserve keys new NAME --role admin`, to use /admin"
            )
        allowed = self._allowed(path)
        if not allowed:
            return None
        key = self._ring.find_key(_secret(path, headers))
        if key is None:
            raise AuthError("the API key is not one of this server's")
        if key.role not in allowed:
            raise ForbiddenError(
                f"this key is one for {key.role}; {path_kind(path)} needs one for {' or '.join(sorted(allowed))}"
            )
        return key

    def _allowed(self, path: str) -> frozenset[KeyRole]:
        """Nobody is asked for a key where this is empty."""
        ring = self._ring
        if path in OPEN_PATHS or path.startswith(PAGE_PREFIX):
            return _ANYBODY
        if path == METRICS_PATH:
            if self._open_metrics:
                return _ANYBODY
            if ring.has_scrapers:
                return frozenset({KeyRole.SCRAPE, KeyRole.ADMIN})
        elif path.startswith(ADMIN_PREFIXES) and (ring.has_admins or ring.has_file):
            return frozenset({KeyRole.ADMIN})
        return _BOTH if ring.has_users else _ANYBODY


def path_kind(path: str) -> str:
    """A path as a message names it: no more of it than the server knows."""
    if path == METRICS_PATH:
        return METRICS_PATH
    return next((prefix for prefix in ADMIN_PREFIXES if path.startswith(prefix)), "the API")


def _secret(path: str, headers: Headers) -> str:
    kind, _, given = headers.get("authorization", "").partition(" ")
    if path.startswith(ANTHROPIC_PREFIX) and "x-api-key" in headers:
        kind, given = "bearer", headers["x-api-key"]
    if kind.lower() != "bearer" or not given:
        raise AuthError("an API key is needed: send it as the header Authorization: Bearer KEY")
    return given.strip()
