"""How two nodes greet, for rows and for KV blocks: each proves that it has the run's token before either says more.

The token never travels: a proof is a keyed hash over both ends' random numbers, what they meet for, who speaks and what
it says. So a stranger learns nothing, what was recorded is worth nothing, and what one end said cannot be sent back to
it. Sizes are bounded before anything is read, and all of it has one deadline.

    caller      hello, its random number
    listener    hello, its random number, proof
    caller      its words, proof
    listener    its words, proof
"""

import hashlib
import hmac
import json
import random
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from afserve.comm.transports.encrypted import Connection
from afserve.errors import AfserveError, AuthError, RendezvousError

_HELLO = b"afserve "
_HELLO_BYTES, _NONCE, _PROOF = 16, 16, 32
_MOST_BYTES = 1 << 14
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds before who was turned away comes again, at most
_LENGTH = struct.Struct("<I")
Words = Mapping[str, str]


class TurnedAway(RendezvousError):
    """The other end hung up before it had answered: most likely it made room for others. `greet` tries again."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who called and has proved itself; it waits for an answer."""

    words: Words
    _line: "_Line"

    def send_answer(self, words: Words) -> None:
        """Raises OSError where it has hung up."""
        self._line.say(b"answers", words)


def greet(
    dial: Callable[[float], Connection], token: str, purpose: str, words: Words, peer: str, seconds: float
) -> tuple[Connection, Words]:
    """What `dial`, given the seconds that are left, connects to, and what is said there to `words`. Who is turned away
    comes again for `seconds` in all. Raises as `call`, and RendezvousError where it does not answer."""
    until, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        try:
            return _greet_once(dial, token, purpose, words, peer, until)
        except TurnedAway:
            if until - time.monotonic() <= pause:
                raise
            time.sleep(random.uniform(0, pause))
            pause = min(2 * pause, _LONGEST_PAUSE)


def _greet_once(
    dial: Callable[[float], Connection], token: str, purpose: str, words: Words, peer: str, until: float
) -> tuple[Connection, Words]:
    connection = dial(max(_FIRST_PAUSE, until - time.monotonic()))
    try:
        return connection, call(connection, token, purpose, words, peer, until)
    except ConnectionError as error:
        connection.close()
        raise TurnedAway(
            f"{peer} hung up before it had answered ({error}); is it ending, or overrun?"
        ) from error
    except (OSError, AfserveError) as error:
        connection.close()
        if isinstance(error, AfserveError):
            raise
        raise RendezvousError(f"{peer}: who answers at its address does not greet ({error})") from error


def call(connection: Connection, token: str, purpose: str, words: Words, peer: str, until: float) -> Words:
    """The end that connected: what the listener said to `words`. `until` is of time.monotonic.

    Raises AuthError or RendezvousError naming `peer` and what is wrong, OSError where it does not answer.
    """
    nonce, hello = secrets.token_bytes(_NONCE), _hello(purpose)
    line = _Line(connection, token, hello, until)
    connection.sendall(hello + nonce)
    if line.read(_HELLO_BYTES) != hello:
        raise RendezvousError(f"{peer}: who answers there does not greet like a node of this version")
    other = line.read(_NONCE)
    if other == nonce:
        raise AuthError(f"{peer}: who answers there only sends back what it is sent")
    line.both = nonce + other
    if not hmac.compare_digest(line.read(_PROOF), line.proof(b"listens", b"")):
        raise AuthError(f"{peer}: who answers there does not have this run's token")
    line.say(b"calls", words)
    return line.read_words(b"answers", peer)


def listen(connection: Connection, token: str, purpose: str, until: float) -> Caller:
    """The end that was called. Raises as `call`."""
    hello = _hello(purpose)
    line = _Line(connection, token, hello, until)
    if (theirs := line.read(_HELLO_BYTES)) != hello:
        if theirs.startswith(_HELLO):  # of another version: it can say so
            connection.sendall(hello)
        raise RendezvousError("it does not greet like a node of this version")
    nonce = secrets.token_bytes(_NONCE)
    line.both = line.read(_NONCE) + nonce
    connection.sendall(hello + nonce + line.proof(b"listens", b""))
    return Caller(line.read_words(b"calls", "who called"), line)


class _Line:
    """One connection under one deadline; `both` ends' random numbers, once both are known."""

    def __init__(self, connection: Connection, token: str, hello: bytes, until: float) -> None:
        self._connection, self._hello, self._until = connection, hello, until
        self._key = hashlib.blake2b(token.encode(), digest_size=_PROOF).digest()
        self.both = b""

    def proof(self, speaker: bytes, body: bytes) -> bytes:
        said = self._hello + speaker.ljust(_HELLO_BYTES, b"\0") + self.both + body
        return hashlib.blake2b(said, key=self._key, digest_size=_PROOF).digest()

    def say(self, speaker: bytes, words: Words) -> None:
        body = json.dumps(dict(words)).encode()
        assert len(body) <= _MOST_BYTES, f"{len(body)} bytes to greet with"
        self._connection.sendall(_LENGTH.pack(len(body)) + body + self.proof(speaker, body))

    def read_words(self, speaker: bytes, peer: str) -> Words:
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if length > _MOST_BYTES:
            raise RendezvousError(f"{peer}: a greeting of {length} bytes came, {_MOST_BYTES} are the limit")
        body = self.read(length)
        if not hmac.compare_digest(self.read(_PROOF), self.proof(speaker, body)):
            raise AuthError(f"{peer} does not have this run's token")
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise RendezvousError(f"{peer}: its greeting is not a table of texts")
        return found

    def read(self, count: int) -> bytes:
        """Raises TimeoutError at the deadline, however slowly bytes come."""
        raw = b""
        while len(raw) < count:
            left = self._until - time.monotonic()
            if left <= 0:
                raise TimeoutError("it did not greet in time")
            self._connection.settimeout(left)
            part = self._connection.recv(count - len(raw))
            if not part:
                raise ConnectionResetError("it hung up")
            raw += part
        return raw


def _hello(purpose: str) -> bytes:
    return (_HELLO + purpose.encode()).ljust(_HELLO_BYTES, b"\n")
