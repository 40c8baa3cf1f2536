"""What two attention nodes say to each other about blocks of KV, as bytes: one table says how each kind is packed.

A message is a head of 64 bytes, with its kind, the version of that kind and its fields, and what follows it. Every
field that came is checked here before memory is allocated for what follows. It knows no sockets.
"""

import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from afserve.comm.kv.messages import (
    MOST_NAMES,
    MOST_ROW,
    MOST_TOKENS,
    NAME_BYTES,
    PIECE_BYTES,
    Abort,
    Ack,
    Among,
    Coming,
    CopiesKept,
    EndTransfer,
    Fetched,
    Grant,
    HandOn,
    Message,
    Name,
    Offer,
    Payload,
    Piece,
    Placed,
    Prefill,
    Renew,
    Row,
    Told,
    Want,
    blocks_of_piece,
)
from afserve.errors import ProtocolError
from afserve.tiles import MOST_TILE_BYTES, pack_tiles, unpack_tiles

_MOST_WHY = 512
_LEAST_WHERE, _MOST_WHERE = 8, 1 << 16  # bytes, where there are any
_MOST_TOLD = 1 << 12  # bytes
_MOST_SALT = 1024  # bytes
_MOST_TILED = MOST_TILE_BYTES + (1 << 16)  # with their heads
MAGIC = 0x41464B56  # AFKV
_FIELD_BYTES = 40
_HEAD = struct.Struct(
    f"<IBBxxQQ{_FIELD_BYTES}s"
)  # magic, kind, version of it, transfer, bytes that follow, fields
HEAD_BYTES = _HEAD.size
_KEYED = struct.Struct(f"<{NAME_BYTES}sQ")


@dataclass(frozen=True, slots=True)
class _Form:
    """How a kind of message is packed: the fields in its head, and the one whose bytes follow, each by its name. One
    that changes has another version; `what_follows` and `read` are between a field's value and bytes."""

    version: int
    names: tuple[str, ...]
    packed: struct.Struct
    rest: str
    what_follows: Callable[[Any], Payload]
    read: Callable[[Payload], object]


def _form(
    version: int,
    fields: str = "",
    rest: str = "",
    what_follows: Callable[[Any], Payload] = memoryview,
    read: Callable[[Payload], object] = lambda body: body,
) -> _Form:
    """`fields` as "name:code name:code", with the codes of `struct`."""
    pairs = [field.split(":") for field in fields.split()]
    packed = struct.Struct("<" + "".join(code for _, code in pairs))
    assert packed.size <= _FIELD_BYTES, fields
    return _Form(version, tuple(name for name, _ in pairs), packed, rest, what_follows, read)


def _names(body: Payload) -> tuple[Name, ...]:
    raw = bytes(body)
    return tuple(raw[at : at + NAME_BYTES] for at in range(0, len(raw), NAME_BYTES))


def _keyed(body: Payload) -> tuple[tuple[Name, int], ...]:
    return tuple(_KEYED.iter_unpack(bytes(body)))


def _why(body: Payload) -> str:
    return bytes(body).decode(errors="replace")


# In the order of `Message`; kinds are numbered from 1. `count` of names is told by their bytes, a Prefill's by itself.
_FORMS: dict[type[Message], _Form] = {
    Want: _form(1, "request:Q generation:I", "names", b"".join, _names),
    Grant: _form(1, "count:I"),
    Piece: _form(1, "first:I count:I checksum:Q", "payload"),
    Ack: _form(1, "first:I count:I slot:q"),
    Renew: _form(1),
    Abort: _form(1),
    EndTransfer: _form(1, "", "why", lambda why: why.encode()[:_MOST_WHY], _why),
    Offer: _form(1, "generation:I", "names", b"".join, _names),
    CopiesKept: _form(1, "count:I"),
    Prefill: _form(
        3,
        "request:Q generation:I priority:i share:H here:I life:I count:I salted:H named:H tiled:I",
        "tokens",
    ),
    Coming: _form(1, "queued:I rate:Q known:I"),
    Row: _form(1, "checksum:Q", "payload"),
    Placed: _form(1, "first:I count:I checksum:Q at:Q", "where", memoryview, bytes),
    Fetched: _form(1, "at:Q"),
    Told: _form(1, "", "what", memoryview, bytes),
    Among: _form(1, "what:I chunk:I layer:I first:I count:I checksum:Q", "body"),
    HandOn: _form(
        1, "generation:I", "blocks", lambda blocks: b"".join(_KEYED.pack(*one) for one in blocks), _keyed
    ),
}
_KINDS: tuple[type[Message], ...] = get_args(Message)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS, 1)}
assert tuple(_FORMS) == _KINDS


@dataclass(slots=True)
class Head:
    """The fixed part of a message with its fields, and how many bytes follow it. Nobody changes one."""

    kind: type[Message]
    transfer: int
    fields: dict[str, int]
    following: int

    @property
    def first(self) -> int:
        return self.fields.get("first", 0)

    @property
    def count(self) -> int:
        """Of blocks or tokens, in those that have such a thing."""
        if self.kind in (Want, Offer):
            return self.following // NAME_BYTES
        if self.kind is HandOn:
            return self.following // _KEYED.size
        return self.fields.get("count", 0)


def encode(message: Message) -> tuple[bytes, Payload]:
    """The fixed part, and what follows it."""
    kind = type(message)
    form = _FORMS[kind]
    body: Payload
    if isinstance(message, Prefill):
        fields, body = _asked(message)
    else:
        fields = form.packed.pack(*[getattr(message, name) for name in form.names])
        body = form.what_follows(getattr(message, form.rest)) if form.rest else b""
    return _HEAD.pack(MAGIC, _NUMBERS[kind], form.version, message.transfer, len(body), fields), body


def _asked(prefill: Prefill) -> tuple[bytes, bytes]:
    """Its fields, and its salt, its tenant, its tokens and its tiles behind each other."""
    p, salt, tenant = prefill, prefill.salt.encode(), prefill.tenant.encode()
    tiles = pack_tiles(p.tiles)
    lengths = len(p.tokens), len(salt), len(tenant), len(tiles)
    fields = p.request, p.generation, p.priority, p.share, p.here, p.life, *lengths
    return _FORMS[Prefill].packed.pack(*fields), salt + tenant + array("I", p.tokens).tobytes() + tiles


def decode_head(raw: Payload, block_bytes: int) -> Head:
    """Raises ProtocolError for what no correct peer sends: then nothing of what follows is read."""
    magic, number, version, transfer, following, packed = _HEAD.unpack(raw)
    if magic != MAGIC or not 1 <= number <= len(_KINDS):
        raise ProtocolError(f"KV blocks: a message begins with {magic:#x} and has the kind {number}")
    kind = _KINDS[number - 1]
    form = _FORMS[kind]
    if version != form.version:
        raise ProtocolError(
            f"KV blocks: a {kind.__name__} of version {version}; this node has version {form.version}"
        )
    fields = dict(zip(form.names, form.packed.unpack_from(packed), strict=True))
    head = Head(kind, transfer, fields, following)
    low, high, fits = _limits(head, block_bytes)
    if not (fits and low <= following <= high):
        raise ProtocolError(
            f"KV blocks: a {kind.__name__} of {head.count} blocks from {head.first} on with {following} bytes; "
            f"blocks have {block_bytes} bytes, and a transfer at most {MOST_NAMES} of them"
        )
    return head


def _limits(head: Head, block_bytes: int) -> tuple[int, int, bool]:
    """The fewest and the most bytes that may follow, and whether its numbers can be right."""
    kind, first, count = head.kind, head.first, head.count
    if kind in (Want, Offer):
        return count * NAME_BYTES, count * NAME_BYTES, 0 < count <= MOST_NAMES
    if kind is HandOn:
        return count * _KEYED.size, count * _KEYED.size, 0 < count <= MOST_NAMES
    if kind is Piece:
        fits = 0 < count <= blocks_of_piece(block_bytes) and first + count <= MOST_NAMES
        return count * block_bytes, count * block_bytes, fits
    if kind is Placed:
        fits = 0 < count <= blocks_of_piece(block_bytes, large=True) and first + count <= MOST_NAMES
        return _LEAST_WHERE if head.following else 0, _MOST_WHERE, fits
    if kind is Prefill:
        tiled = head.fields["tiled"]
        fits = 0 < count <= MOST_TOKENS and tiled <= _MOST_TILED
        return 4 * count + tiled, 4 * count + tiled + _MOST_SALT, fits
    if kind is Coming:
        return 0, 0, head.fields["known"] <= MOST_NAMES
    if kind is Row:
        return 1, MOST_ROW, True
    if kind is Told:
        return 1, _MOST_TOLD, True
    if kind is Among:
        most = 4 * MOST_TOKENS if not count else max(PIECE_BYTES, block_bytes)
        return 0, most, first + count <= MOST_TOKENS
    return 0, _MOST_WHY if kind is EndTransfer else 0, first + count <= MOST_NAMES


def decode(head: Head, body: Payload) -> Message:
    """`body` is what followed, all of it."""
    if head.kind is Prefill:
        return _prefill(head, bytes(body))
    form = _FORMS[head.kind]
    rest = {form.rest: form.read(body)} if form.rest else {}
    return head.kind(head.transfer, **head.fields, **rest)  # type: ignore[arg-type]


def _prefill(head: Head, body: bytes) -> Prefill:
    fields = dict(head.fields)
    count, salted, named, tiled = (fields.pop(name) for name in ("count", "salted", "named", "tiled"))
    texts, rest = body[: salted + named], body[salted + named :]
    if len(rest) != 4 * count + tiled:
        raise ProtocolError(
            f"KV blocks: a Prefill of {count} tokens has {len(rest)} bytes behind a salt of {salted} "
            f"and a name of {named}"
        )
    tokens = array("I")
    tokens.frombytes(rest[: 4 * count])
    try:
        tiles = unpack_tiles(rest[4 * count :])
    except ValueError as error:
        raise ProtocolError(f"KV blocks: a Prefill with {error}") from error
    salt, tenant = (text.decode(errors="replace") for text in (texts[:salted], texts[salted:]))
    return Prefill(head.transfer, tokens=tuple(tokens), salt=salt, tenant=tenant, tiles=tiles, **fields)
