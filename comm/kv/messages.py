"""What two attention nodes say to each other about blocks of KV, as values; `forms.py` has them as bytes.

The puller says Want, Ack, Renew and Abort; the lender says Grant, Piece and End. A Prefill before a Want asks the
lender to compute what is wanted first; it says Coming until that is done, and then Row. An Offer asks the other end to
pull, as a HandOn of one that leaves does, and CopiesKept answers it. Where the bytes of a Piece are not in the message,
Placed stands for it and Fetched answers (`rooms.py`, `carried.py`); Told is between the libraries that carry them.
Nodes that compute a prompt together say Among (`split_messages.py`). A transfer's number is the puller's, an offer's
is whose it is. It knows no sockets and no blocks.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from afserve.comm.kv.rooms import NOWHERE
from afserve.tiles import PictureTile

Name = bytes  # of a block: a cryptographic hash of the model, the dtype, the tenant's salt and all tokens up to its end
Payload = bytes | bytearray | memoryview
NAME_BYTES = 16
MOST_NAMES = 1 << 16
PIECE_BYTES = 1 << 21  # of blocks in one message, unless one block is larger
_LARGE = 2  # so many times that where the bytes lie in memory that both ends have
MOST_TOKENS = 1 << 24  # of a prompt
MOST_ROW = 1 << 19  # bytes


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
class EndTransfer:
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
class HandOn:
    """As an Offer of one that leaves, for memory that is free. Each block comes with the key of the beginning that ends
    there, as gateways know it, or 0."""

    transfer: int
    generation: int
    blocks: tuple[tuple[Name, int], ...]


@dataclass(frozen=True, slots=True)
class CopiesKept:
    """Of the blocks of an offer, the first `count` are kept now."""

    transfer: int
    count: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute these tokens: the Want of the same transfer asks for their blocks, which are sent as they are filled.

    `request` is the puller's number of whose they are, for traces. `generation` is the life of the node that is asked;
    of requests the one with the lowest `priority` is first, a `tenant` has turns by its `share`, and `salt` keeps the
    blocks of tenants apart. The puller, in that `life` of it, has the first `here` blocks of the prompt itself, and
    lends them until the transfer ends. `tiles` are of pictures in the prompt.
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
    tiles: tuple[PictureTile, ...] = ()


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
    chunk: int = 0


Message = (
    Want
    | Grant
    | Piece
    | Ack
    | Renew
    | Abort
    | EndTransfer
    | Offer
    | CopiesKept
    | Prefill
    | Coming
    | Row
    | Placed
    | Fetched
    | Told
    | Among
    | HandOn
)


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


def blocks_of_piece(block_bytes: int, *, large: bool = False) -> int:
    return max(1, PIECE_BYTES * (_LARGE if large else 1) // block_bytes)
