"""What two attention nodes say to each other about blocks of KV, as values and as bytes.

The puller says Want, Ack, Renew and Abort; the lender says Grant, Piece and End. A Prefill before a Want asks the
lender to compute what is wanted first; it says Coming until that is done, and then Row. An Offer asks the other end to
pull, and Settled answers it. Where the bytes of a Piece are not in the message, Placed stands for it and Fetched
answers (`rooms.py`, `carried.py`); Told is between the libraries that carry them. Nodes that compute a prompt together
say Among (`split_messages.py`). A transfer's number is the puller's, an offer's is whose it is. Every field that came
is checked here before memory is allocated for what follows. It knows no sockets and no blocks.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import xxhash

from afserve.comm.kv.rooms import NOWHERE
from afserve.errors import ProtocolError

Name = bytes  # of a block: a cryptographic hash of the model, the dtype, the tenant's salt and all tokens up to its end
Payload = bytes | bytearray | memoryview
NAME_BYTES = 16
MOST_NAMES = 1 << 16
PIECE_BYTES = 1 << 21  # of blocks in one message, unless one block is larger
_LARGE = 2  # so many times that where the bytes lie in memory that both ends have
MOST_TOKENS = 1 << 24  # of a prompt
MOST_ROW = 1 << 19  # bytes
_MOST_WHY = 512
_LEAST_WHERE, _MOST_WHERE = 8, 1 << 16  # bytes, where there are any
_MOST_TOLD = 1 << 12  # bytes
_MOST_SALT = 1024  # bytes
_WHAT_BITS = 32
_ASKED = struct.Struct("<iHHHII")  # priority, share, bytes of the salt and of the tenant's name, here, life
MAGIC = 0x41464B56  # AFKV
_HEAD = struct.Struct(
    "<IBxxxQQIIQQ"
)  # magic, kind, transfer, request, first, count, checksum, bytes that follow
HEAD_BYTES = _HEAD.size


@dataclass(frozen=True, slots=True)
class Want:
    """Lend me these blocks of `request` (0: of none), a chain from its beginning on. `generation` is the life of the
    node that they are asked of."""

    transfer: int
    request: int
    generation: int
    names: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """The first `count` of the blocks are lent."""

    transfer: int
    count: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks `first` .. `first + count - 1` of what was wanted, `count` rows of bytes one behind the other. Its bytes
    lie at the offset `slot` of memory that both ends have, or NOWHERE in it."""

    transfer: int
    first: int
    count: int
    checksum: int
    payload: Payload
    slot: int = NOWHERE


@dataclass(frozen=True, slots=True)
class Ack:
    """The puller has these blocks; what is lent is lent on. It waits no more for what lay at the offset `slot`."""

    transfer: int
    first: int
    count: int
    slot: int = NOWHERE


@dataclass(frozen=True, slots=True)
class Renew:
    """The puller still waits."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The puller wants no more of it."""

    transfer: int


@dataclass(frozen=True, slots=True)
class End:
    """The lender sends no more of it."""

    transfer: int
    why: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Please keep copies of these blocks, a part of a chain. `generation` is the life of the node that asks."""

    transfer: int
    generation: int
    names: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class Settled:
    """Of the blocks of an offer, the first `count` are kept now."""

    transfer: int
    count: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute these tokens: the Want of the same transfer asks for their blocks, which are sent as they are filled.

    `request` is the puller's number of whose they are, for traces. `generation` is the life of the node that is asked;
    of requests the one with the lowest `priority` is first, a `tenant` has turns by its `share`, and `salt` keeps the
    blocks of tenants apart. The puller, in that `life` of it, has the first `here` blocks of the prompt itself, and
    lends them until the transfer ends.
    """

    transfer: int
    request: int
    generation: int
    tokens: tuple[int, ...]
    priority: int = 0
    salt: str = ""
    tenant: str = ""
    share: int = 1
    here: int = 0
    life: int = 0


@dataclass(frozen=True, slots=True)
class Coming:
    """The lender still computes: `queued` tokens of prompts are before it, at `rate` tokens per second (0: unknown).
    The first `known` of the blocks that were wanted were in its cache before."""

    transfer: int
    queued: int
    rate: int
    known: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """Behind the last token of a Prefill: what the model's last layer gave, from which the next token is drawn."""

    transfer: int
    checksum: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Placed:
    """The bytes of a Piece lie `at` this offset of the lender's memory, which its library calls `where`. That is empty
    where both ends have this memory."""

    transfer: int
    first: int
    count: int
    checksum: int
    at: int
    where: bytes


@dataclass(frozen=True, slots=True)
class Fetched:
    """The puller waits no more for what was placed `at` this offset."""

    transfer: int
    at: int


@dataclass(frozen=True, slots=True)
class Told:
    """What the library at one end has to say to that at the other; of no transfer (0)."""

    transfer: int
    what: bytes


@dataclass(frozen=True, slots=True)
class Among:
    """Between nodes that compute one prompt together, as `split_messages.py` has it."""

    transfer: int
    what: int
    layer: int = 0
    first: int = 0
    count: int = 0
    checksum: int = 0
    body: Payload = b""


Message = (
    Want
    | Grant
    | Piece
    | Ack
    | Renew
    | Abort
    | End
    | Offer
    | Settled
    | Prefill
    | Coming
    | Row
    | Placed
    | Fetched
    | Told
    | Among
)
_KINDS: tuple[type[Message], ...] = get_args(Message)  # in this order they are numbered
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS, 1)}


def checksum_of(sums: Sequence[int]) -> int:
    """Of a piece, from those of its blocks, each seeded with its name: right bytes in the wrong place are wrong too."""
    checksum: int = xxhash.xxh3_64_intdigest(array("Q", sums).tobytes())
    return checksum


def seeded_checksum(payload: Payload, *seeds: Name) -> int:
    """XXH3 of the bytes of a row or a slice, seeded with what they are said to be of."""
    seed = hashlib.blake2b(b"".join(seeds), digest_size=8).digest()
    checksum: int = xxhash.xxh3_64_intdigest(payload, int.from_bytes(seed, "little"))
    return checksum


def named(tokens: Sequence[int], before: Name = b"") -> Name:
    """A prompt, so that no row is taken for another one's; or how one goes on that is named `before`."""
    return hashlib.blake2b(before + array("I", tokens).tobytes(), digest_size=NAME_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Head:
    """The fixed part of a message, and how many bytes follow it."""

    kind: type[Message]
    transfer: int
    request: int
    first: int
    count: int
    checksum: int
    following: int


def encode(message: Message) -> tuple[bytes, Payload]:
    """The fixed part, and what follows it."""
    request = first = count = checksum = 0
    body: Payload = b""
    match message:
        case Want(_, request, first, names):
            body, count = b"".join(names), len(names)
        case Offer(_, first, names):
            body, count = b"".join(names), len(names)
        case Piece(_, first, count, checksum, body, _):
            body = memoryview(body)
        case Ack(_, first, count, slot):
            request = slot - NOWHERE
        case Grant(_, count) | Settled(_, count):
            body = b""
        case End(_, why):
            body = why.encode()[:_MOST_WHY]
        case Prefill(_, request, first, tokens, priority, salt, tenant, share, here, life):
            salted, named = salt.encode(), tenant.encode()
            asked = _ASKED.pack(priority, share, len(salted), len(named), here, life)
            body, count = asked + salted + named + array("I", tokens).tobytes(), len(tokens)
        case Coming(_, count, checksum, first):
            body = b""
        case Row(_, checksum, body):
            body = memoryview(body)
        case Placed(_, first, count, checksum, request, body):
            body = memoryview(body)
        case Fetched(_, request):
            body = b""
        case Told(_, body):
            body = memoryview(body)
        case Among(_, what, layer, first, count, checksum, body):
            body, request = memoryview(body), what << _WHAT_BITS | layer
    kind, following = _NUMBERS[type(message)], len(body)
    return _HEAD.pack(MAGIC, kind, message.transfer, request, first, count, checksum, following), body


def decode_head(raw: Payload, block_bytes: int) -> Head:
    """Raises ProtocolError for what no correct peer sends: then nothing of what follows is read."""
    magic, number, transfer, request, first, count, checksum, following = _HEAD.unpack(raw)
    if magic != MAGIC or not 1 <= number <= len(_KINDS):
        raise ProtocolError(f"KV blocks: a message begins with {magic:#x} and has the kind {number}")
    kind = _KINDS[number - 1]
    if kind in (Want, Offer):
        low = high = count * NAME_BYTES
        fits = 0 < count <= MOST_NAMES
    elif kind is Piece:
        low = high = count * block_bytes
        fits = 0 < count <= blocks_of_piece(block_bytes) and first + count <= MOST_NAMES
    elif kind is Placed:
        low, high = _LEAST_WHERE if following else 0, _MOST_WHERE
        fits = 0 < count <= blocks_of_piece(block_bytes, large=True) and first + count <= MOST_NAMES
    elif kind is Prefill:
        low = _ASKED.size + 4 * count
        high, fits = low + _MOST_SALT, 0 < count <= MOST_TOKENS
    elif kind is Coming:
        low, high, fits = 0, 0, first <= MOST_NAMES
    elif kind is Row:
        low, high, fits = 1, MOST_ROW, True
    elif kind is Told:
        low, high, fits = 1, _MOST_TOLD, True
    elif kind is Among:
        low, high = 0, 4 * MOST_TOKENS if not count else max(PIECE_BYTES, block_bytes)
        fits = first + count <= MOST_TOKENS
    else:
        low, high = 0, _MOST_WHY if kind is End else 0
        fits = first + count <= MOST_NAMES
    if not (fits and low <= following <= high):
        raise ProtocolError(
            f"KV blocks: a {kind.__name__} of {count} blocks from {first} on with {following} bytes; blocks have "
            f"{block_bytes} bytes, and a transfer at most {MOST_NAMES} of them"
        )
    return Head(kind, transfer, request, first, count, checksum, following)


def decode(head: Head, body: Payload) -> Message:
    """`body` is what followed, all of it."""
    transfer = head.transfer
    if head.kind is Want:
        return Want(transfer, head.request, head.first, _names(body))
    if head.kind is Offer:
        return Offer(transfer, head.first, _names(body))
    if head.kind is Piece:
        return Piece(transfer, head.first, head.count, head.checksum, body)
    if head.kind is Ack:
        return Ack(transfer, head.first, head.count, head.request + NOWHERE)
    if head.kind is Grant:
        return Grant(transfer, head.count)
    if head.kind is Settled:
        return Settled(transfer, head.count)
    if head.kind is End:
        return End(transfer, bytes(body).decode(errors="replace"))
    if head.kind is Prefill:
        return _prefill(head, bytes(body))
    if head.kind is Coming:
        return Coming(transfer, head.count, head.checksum, head.first)
    if head.kind is Row:
        return Row(transfer, head.checksum, body)
    if head.kind is Placed:
        return Placed(transfer, head.first, head.count, head.checksum, head.request, bytes(body))
    if head.kind is Fetched:
        return Fetched(transfer, head.request)
    if head.kind is Told:
        return Told(transfer, bytes(body))
    if head.kind is Among:
        what, layer = head.request >> _WHAT_BITS, head.request & ((1 << _WHAT_BITS) - 1)
        return Among(transfer, what, layer, head.first, head.count, head.checksum, body)
    return Renew(transfer) if head.kind is Renew else Abort(transfer)


def _prefill(head: Head, body: bytes) -> Prefill:
    priority, share, length, named, here, life = _ASKED.unpack_from(body)
    texts, rest = body[_ASKED.size :][: length + named], body[_ASKED.size + length + named :]
    if len(rest) != 4 * head.count:
        raise ProtocolError(
            f"KV blocks: a Prefill of {head.count} tokens has {len(rest)} bytes behind a salt of {length} "
            f"and a name of {named}"
        )
    tokens = array("I")
    tokens.frombytes(rest)
    salt, tenant = (text.decode(errors="replace") for text in (texts[:length], texts[length:]))
    asked = priority, salt, tenant, share
    return Prefill(head.transfer, head.request, head.first, tuple(tokens), *asked, here, life)


def blocks_of_piece(block_bytes: int, *, large: bool = False) -> int:
    return max(1, PIECE_BYTES * (_LARGE if large else 1) // block_bytes)


def _names(body: Payload) -> tuple[Name, ...]:
    raw = bytes(body)
    return tuple(raw[at : at + NAME_BYTES] for at in range(0, len(raw), NAME_BYTES))
