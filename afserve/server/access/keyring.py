"""Which keys open what, now: those of the settings, and those of a file that is read again when it has changed."""

import hmac
import logging
import os
from collections.abc import Iterable, Mapping

from starlette.datastructures import Headers

from afserve.clock import Clock, MonotonicClock
from afserve.errors import AuthError, ConfigError, UserError
from afserve.server.access.key_file import Key, KeyRole, digest_of, read_key_file

LOOK_SECONDS = 1.0  # between two looks at the file: so late does a revocation reach a gateway
log = logging.getLogger("afserve.server")
Stamp = tuple[int, int, int, int]


class Keyring:
    """`find` is cheap enough for every request: one hash, and one look at the file's date per second."""

    def __init__(
        self,
        users: Iterable[str] = (),
        admins: Iterable[str] = (),
        path: str = "",
        clock: Clock | None = None,
    ) -> None:
        """`users` and `admins` are keys in plain text, without names and limits. Raises ConfigError on a wrong file."""
        self._path, self._clock = path, clock or MonotonicClock()
        roles = dict.fromkeys(users, KeyRole.USER)
        self._for_users = bool(roles)  # also where one of them is an admin's too
        roles |= dict.fromkeys(admins, KeyRole.ADMIN)
        self._plain = tuple(_plain(secret, role) for secret, role in roles.items())
        self._looked, self._stamp = self._clock.now(), _stamp(path)
        self._by_digest: Mapping[str, Key] = {}
        self._take(read_key_file(path) if path else ())

    def _take(self, keys: tuple[Key, ...]) -> None:
        valid = [key for key in (*self._plain, *keys) if not key.revoked]
        self._by_digest = {key.digest: key for key in valid}
        roles = {key.role for key in valid}
        self.has_file = bool(self._path)
        self.has_users = self.has_file or self._for_users
        self.has_admins = KeyRole.ADMIN in roles
        # A revoked one counts: to revoke a key opens nothing to others.
        self.has_scrapers = any(key.role is KeyRole.SCRAPE for key in keys)

    def find_key(self, secret: str) -> Key | None:
        """The key that a client sent. Nobody can choose a digest, so how long it takes to look one up tells nothing of
        the keys that there are."""
        self.read_changes()
        digest = digest_of(secret)
        key = self._by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    def key_named(self, name: str) -> Key | None:
        """For work that goes on without a connection, such as a batch; revoked ones are not found."""
        self.read_changes()
        return next((key for key in self._by_digest.values() if key.name == name), None)

    def read_changes(self) -> None:
        """Read the file again if it has changed. One that cannot be used changes nothing, and is logged once."""
        now = self._clock.now()
        if not self._path or now - self._looked < LOOK_SECONDS:
            return
        self._looked, stamp = now, _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(read_key_file(self._path))
        except ConfigError as error:
            log.error("%s; the keys that were read before stay in force", error.message)
        else:
            log.warning("api-keys: read again, %d keys are in force", len(self._by_digest))


def _plain(secret: str, role: KeyRole) -> Key:
    digest = digest_of(secret)
    return Key(f"{role}-{digest[:8]}", digest, role)


def _stamp(path: str) -> Stamp | None:
    """What changes with the file; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode


OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/", "/docs"})
PAGE_PREFIX = "/static/"
METRICS_PATH = "/metrics"
CHANGING_PREFIXES = ("/admin", "/scale_elastic_ep", "/is_scaling_elastic_ep")
ADMIN_PREFIXES = (*CHANGING_PREFIXES, "/status", "/live")
ANTHROPIC_PREFIX = "/v1/messages"  # whose clients send the key in a header of its own
_ANYBODY: frozenset[KeyRole] = frozenset()
_BOTH = frozenset({KeyRole.USER, KeyRole.ADMIN})


class ForbiddenError(UserError):
    """A key that does not open this, a name that is not this server's, or a web page that may not ask it."""

    status = 403
    kind = "permission_error"


class AccessRules:
    """Which key a path needs. Health, readiness and the page hold no data: they need none. With no keys everything is
    open, as on a loopback address."""

    def __init__(self, ring: Keyring, *, open_metrics: bool) -> None:
        self._ring, self._open_metrics = ring, open_metrics

    def pass_by(self, path: str, headers: Headers) -> Key | None:
        """The key that was sent, None where none is needed. Raises AuthError and ForbiddenError."""
        self._ring.read_changes()
        if path.startswith(CHANGING_PREFIXES) and not self._ring.has_admins:
            raise AuthError(
                "this server has no admin key; start it with --admin-key-file, or make one for its --api-keys file "
                f"with `afserve keys new NAME --role admin`, to use {path_kind(path)}"
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
