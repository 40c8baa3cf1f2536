"""A file of API keys: one table per key, in TOML, that has the key's hash and limits, never the key.

A key is 32 random bytes. To guess one is as hard as to guess its SHA-256, so a slow hash, which is for passwords that
people choose, would make every request slower and no key safer. Knows no HTTP; `afserve keys` writes the file, gateways
read it.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path

from afserve.config_ranges import Range
from afserve.engine.scheduling.request import MAX_PRIORITY, MAX_SHARE
from afserve.errors import ConfigError, shown

MOST_BYTES = 256 << 10  # more than a thousand keys; gateways read it between two requests
PREFIX = "afs_"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile("[0-9a-f]{64}")
_HEAD = (
    "# API keys of afserve, as hashes. `afserve keys` writes this file; limits may also be edited by hand.\n"
)


class KeyRole(StrEnum):
    """What a key opens: `user` the API, `admin` everything, `scrape` /metrics alone."""

    USER = "user"
    ADMIN = "admin"
    SCRAPE = "scrape"


def _check(name: str, value: object, allowed: Range) -> None:
    if value is not None and not allowed.holds(value):
        raise ConfigError.about(
            name, f"{shown(value)} is not a whole number in [{allowed.low}, {allowed.high}]"
        )


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """None is without a limit. `priority` is the lowest number, which is the earliest turn, that requests get. Of keys
    whose requests wait, one with twice the `share` is given twice the tokens; None is a share of 1."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    priority: int | None = None
    share: int | None = None

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "concurrent"):
            _check(name, getattr(self, name), Range(1, 1 << 40))
        _check("priority", self.priority, Range(-MAX_PRIORITY, MAX_PRIORITY))
        _check("share", self.share, Range(1, MAX_SHARE))

    @property
    def counted(self) -> bool:
        """Whether requests must be counted."""
        return any((self.requests_per_minute, self.tokens_per_minute, self.concurrent))


@dataclass(frozen=True, slots=True)
class Key:
    """`digest` is the hexadecimal SHA-256 of the key. `created` and `revoked` are dates, as people read them."""

    name: str
    digest: str
    role: KeyRole = KeyRole.USER
    limits: KeyLimits = KeyLimits()
    created: str = ""
    revoked: str = ""


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def read_key_file(path: str | Path) -> tuple[Key, ...]:
    """Raises ConfigError for a file that others can read, or that names a key or a limit wrongly."""
    try:
        with open(path, "rb") as file:
            check_private(path, os.fstat(file.fileno()), "api-keys")
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError.about("api-keys", f"{path}: {error.strerror}") from error
    if len(text) > MOST_BYTES:
        raise _refused(path, f"has more than {MOST_BYTES} bytes; remove revoked keys")
    try:
        tables = tomllib.loads(text.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _refused(path, f"is not TOML: {error}; `afserve keys` writes such files") from error
    keys = tuple(_key(path, name, table) for name, table in tables.items())
    seen: dict[str, str] = {}
    for key in keys:
        if (other := seen.setdefault(key.digest, key.name)) != key.name:
            raise _refused(path, f"{key.name} and {other} have the same hash; give each a key of its own")
    return keys


def _key(path: str | Path, name: str, table: object) -> Key:
    if not NAME.fullmatch(name) or not isinstance(table, Mapping):
        raise _refused(
            path, f"{shown(name)}: is not a table [NAME] with a name of letters, digits, '.', '_', '-'"
        )
    values = dict(table)
    texts = {}
    for part in ("sha256", "role", "created", "revoked"):
        texts[part] = values.pop(part, "")
        if not isinstance(texts[part], str):
            raise _refused(path, f"[{name}] {part}: {shown(texts[part])} is not a text in quotes")
    if not _HASH.fullmatch(texts["sha256"]):
        raise _refused(path, f"[{name}] sha256: is not 64 digits 0-9, a-f")
    role = texts["role"] or KeyRole.USER
    if role not in tuple(KeyRole):
        raise _refused(path, f"[{name}] role: {shown(role)} is none of {', '.join(KeyRole)}")
    known = {field.name for field in fields(KeyLimits)}
    if unknown := sorted(set(values) - known):
        raise _refused(
            path, f"[{name}] {unknown[0]}: is none of {', '.join(sorted(known))}, role, created, revoked"
        )
    try:
        limits = KeyLimits(**values)
    except ConfigError as error:
        raise _refused(path, f"[{name}] {error.message}") from error
    return Key(name, texts["sha256"], KeyRole(role), limits, texts["created"], texts["revoked"])


def _refused(path: str | Path, why: str) -> ConfigError:
    return ConfigError.about("api-keys", f"{path}: {why}")


def check_private(path: str | Path, found: os.stat_result, what: str) -> None:
    """A group may read it where it is another user's: that is how secrets are handed to a container."""
    mine = found.st_uid == os.geteuid()
    if stat.S_ISREG(found.st_mode) and found.st_mode & (0o077 if mine else 0o007):
        raise ConfigError.about(
            what,
            f"{path} can be read by others (mode {stat.S_IMODE(found.st_mode):03o}); type: chmod 600 {path}",
        )


# ---- changes, each of which replaces the file in one step


def add_key(path: Path, name: str, role: KeyRole, limits: KeyLimits) -> str:
    """The new key, which is nowhere else. Raises ConfigError for a name that is taken."""
    if not NAME.fullmatch(name):
        raise ConfigError.about("name", f"{shown(name)} is not 1 to 64 letters, digits, '.', '_' and '-'")
    secret = new_secret()
    with _changing(path) as keys:
        if name in keys:
            raise ConfigError.about("name", f"{path} has a key {name!r}; take another name, or revoke it")
        keys[name] = Key(name, digest_of(secret), role, limits, _now())
    return secret


def revoke_key(path: Path, name: str) -> None:
    """It stays in the file, as one that opens nothing. Raises ConfigError where there is none of that name."""
    read_key_file(path)
    with _changing(path) as keys:
        if name not in keys:
            raise ConfigError.about("name", f"{path} has no key {shown(name)}; see `afserve keys list`")
        keys[name] = replace(keys[name], revoked=keys[name].revoked or _now())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextmanager
def _changing(path: Path) -> Iterator[dict[str, Key]]:
    """Its keys by name; what they are at the end of `with` is written. One change at a time."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError.about("api-keys", f"{path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = {key.name: key for key in read_key_file(path)} if path.exists() else {}
        yield keys
        _write(path, keys.values())
    finally:
        os.close(folder)


def _write(path: Path, keys: Iterable[Key]) -> None:
    text = _HEAD + "".join(map(_table, keys))
    if len(text.encode()) > MOST_BYTES:
        raise _refused(
            path, f"would have more than {MOST_BYTES} bytes; remove the tables of revoked keys first"
        )
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(
            os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError.about("api-keys", f"{path}: {error.strerror}") from error


def _table(key: Key) -> str:
    lines = [f'\n["{key.name}"]', f'sha256 = "{key.digest}"', f'role = "{key.role}"']
    for field in fields(KeyLimits):
        if (value := getattr(key.limits, field.name)) is not None:
            lines.append(f"{field.name} = {value}")
    lines += [
        f"{part} = {json.dumps(date)}" for part in ("created", "revoked") if (date := getattr(key, part))
    ]
    return "\n".join(lines) + "\n"
