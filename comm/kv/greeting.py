"""How two attention nodes greet: each proves that it has the run's token, then both compare what a block is.

The token itself never travels: each end sends a keyed hash over both ends' random numbers and its own words. Who does
not agree is told the field that differs. Sizes are bounded before anything is read.
"""

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Mapping

from afserve.comm.transports.encrypted import Connection
from afserve.errors import AuthError, RendezvousError

PROTOCOL = 7
GREETING_SECONDS = 1.0
_HELLO = b"afserve-kv 1\n"
_NONCE, _PROOF = 16, 32
_MOST_BYTES = 1 << 14
_LENGTH = struct.Struct("<I")
Terms = Mapping[str, str]


def dial(connection: Connection, token: str, terms: Terms, peer: str) -> None:
    """The end that connected. Raises AuthError or RendezvousError naming what is wrong, OSError where it hung up."""
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(_HELLO + nonce)
    if _read(connection, len(_HELLO)) != _HELLO:
        raise RendezvousError(
            f"{peer}: who answers there does not greet like an attention node of this version"
        )
    both = nonce + _read(connection, _NONCE)
    theirs = _take(connection, token, b"listens" + both, peer)
    _put(connection, token, b"dials" + both, terms)
    compare(terms, theirs, peer)
    if verdict := _take_text(connection):
        raise RendezvousError(verdict)


def answer(connection: Connection, token: str, terms: Terms, peer: str) -> None:
    """The end that listens; raises as `dial`."""
    if _read(connection, len(_HELLO)) != _HELLO:
        raise RendezvousError(f"{peer}: who called does not greet like an attention node of this version")
    nonce = secrets.token_bytes(_NONCE)
    both = _read(connection, _NONCE) + nonce
    connection.sendall(_HELLO + nonce)
    _put(connection, token, b"listens" + both, terms)
    theirs = _take(connection, token, b"dials" + both, peer)
    try:
        compare(terms, theirs, peer)
    except RendezvousError as error:
        _put_text(connection, error.message)
        raise
    _put_text(connection, "")


def compare(mine: Terms, theirs: Terms, peer: str) -> None:
    """Raises RendezvousError naming the first field in which the two differ."""
    for field in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(field, "nothing"), theirs.get(field, "nothing")
        if here != there:
            raise RendezvousError(
                f"KV blocks of {peer}: {field} is {there} there and {here} here; tokens are computed again",
                param=field,
            )


def _put(connection: Connection, token: str, said: bytes, terms: Terms) -> None:
    body = json.dumps(dict(terms)).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body + _proof(token, said, body))


def _take(connection: Connection, token: str, said: bytes, peer: str) -> Terms:
    body = _read_block(connection)
    if not hmac.compare_digest(_read(connection, _PROOF), _proof(token, said, body)):
        raise AuthError(f"{peer}: who is there does not have this run's token")
    found = json.loads(body)
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise RendezvousError(f"{peer}: its greeting is not a table of texts")
    return found


def _proof(token: str, said: bytes, body: bytes) -> bytes:
    key = hashlib.blake2b(token.encode(), digest_size=_PROOF).digest()
    return hashlib.blake2b(said + body, key=key, digest_size=_PROOF).digest()


def _put_text(connection: Connection, text: str) -> None:
    body = text.encode()[:_MOST_BYTES]
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _take_text(connection: Connection) -> str:
    return _read_block(connection).decode(errors="replace")


def _read_block(connection: Connection) -> bytes:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _MOST_BYTES:
        raise RendezvousError(f"a greeting of {length} bytes came, {_MOST_BYTES} are the limit")
    return _read(connection, length)


def _read(connection: Connection, count: int) -> bytes:
    raw = b""
    while len(raw) < count:
        part = connection.recv(count - len(raw))
        if not part:
            raise OSError("it hung up")
        raw += part
    return raw
