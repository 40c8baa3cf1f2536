"""What nodes say that compute one prompt together, as values and as the bytes of an `Among`.

A decode node says Helped to the lead before it asks for the prompt. The lead says Propose to the others, who answer
GroupJoined or Leave; Go begins it. Slices are one layer of some blocks, from whoever computes them to whoever needs
them; all say Here meanwhile. Leave ends it for everybody. A group's number is the lead's choice. Every field that came
is checked here.
"""

import struct
from dataclasses import dataclass

from afserve.comm.kv.forms import HEAD_BYTES, decode, decode_head, encode
from afserve.comm.kv.messages import Among, Name, Payload, Prefill, seeded_checksum
from afserve.comm.kv.split import MOST_PARTS, Split, SplitMember
from afserve.errors import ProtocolError

_SPLIT = struct.Struct("<IIIHHI")  # tokens, start, chunk, parts, mine, bytes of the members
_MOST_WHY = 512


@dataclass(frozen=True, slots=True)
class Helped:
    """The Prefill of this transfer is to be computed by these, the first of which is who is told."""

    transfer: int
    members: tuple[SplitMember, ...]


@dataclass(frozen=True, slots=True)
class Propose:
    """Compute your part of this prompt. `prefill` has the tokens up to the end of it, and the generation of who is
    asked."""

    group: int
    split: Split
    members: tuple[SplitMember, ...]
    prefill: Prefill


@dataclass(frozen=True, slots=True)
class GroupJoined:
    group: int
    part: int


@dataclass(frozen=True, slots=True)
class Go:
    """All have joined."""

    group: int


@dataclass(frozen=True, slots=True)
class Slice:
    """One layer of the blocks `first` .. `first + count - 1` of the prompt, which are of this chunk of it."""

    group: int
    chunk: int
    layer: int
    first: int
    count: int
    checksum: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Here:
    """Whoever has this part is still at it, or waits."""

    group: int
    part: int


@dataclass(frozen=True, slots=True)
class Leave:
    """It is over: who needs the prompt computes what is missing."""

    group: int
    why: str


SplitMessage = Helped | Propose | GroupJoined | Go | Slice | Leave | Here
_KINDS: tuple[type[SplitMessage], ...] = (Helped, Propose, GroupJoined, Go, Slice, Leave, Here)


def slice_checksum(prompt: Name, layer: int, first: int, count: int, payload: Payload) -> int:
    """Right bytes in the wrong place are wrong too, and so are those of other tokens: `prompt` names all of them up to
    the end of the chunk, as whoever checks has them."""
    return seeded_checksum(payload, prompt, struct.pack("<III", layer, first, count))


def wrap(message: SplitMessage) -> Among:
    what = _KINDS.index(type(message))
    match message:
        case Helped(transfer, members):
            return Among(transfer, what, body=_texts(members))
        case Propose(group, split, members, prefill):
            head, body = encode(prefill)
            texts = _texts(members)
            packed = _SPLIT.pack(split.tokens, split.start, split.chunk, split.parts, split.mine, len(texts))
            return Among(group, what, body=b"".join((packed, texts, head, body)))
        case GroupJoined(group, part) | Here(group, part):
            return Among(group, what, first=part)
        case Go(group):
            return Among(group, what)
        case Slice(group, chunk, layer, first, count, checksum, payload):
            return Among(group, what, layer, first, count, checksum, payload, chunk)
        case Leave(group, why):
            return Among(group, what, body=why.encode()[:_MOST_WHY])


def unwrap(among: Among, block_bytes: int) -> SplitMessage:
    """Raises ProtocolError for what no correct peer sends."""
    if among.what >= len(_KINDS):
        raise ProtocolError(f"KV blocks: an Among of the kind {among.what}; there are {len(_KINDS)}")
    kind = _KINDS[among.what]
    try:
        if kind is Helped:
            return Helped(among.transfer, _members(bytes(among.body)))
        if kind is Propose:
            return _proposal(among.transfer, bytes(among.body), block_bytes)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"KV blocks: a {kind.__name__} that cannot be read: {error}") from None
    if kind is Slice:
        place = among.layer, among.first, among.count
        return Slice(among.transfer, among.chunk, *place, among.checksum, among.body)
    if kind is Leave:
        return Leave(among.transfer, bytes(among.body[:_MOST_WHY]).decode(errors="replace"))
    if kind is GroupJoined:
        return GroupJoined(among.transfer, among.first)
    return Here(among.transfer, among.first) if kind is Here else Go(among.transfer)


def _proposal(group: int, body: bytes, block_bytes: int) -> Propose:
    tokens, start, chunk, parts, mine, length = _SPLIT.unpack_from(body)
    members, rest = _members(body[_SPLIT.size :][:length]), body[_SPLIT.size + length :]
    if not (chunk > 0 and start < tokens and 1 < parts == len(members) and mine < parts):
        raise ValueError(f"{len(members)} nodes for {parts} parts of {tokens} tokens in chunks of {chunk}")
    split = Split(tokens, start, chunk, parts, mine)
    head = decode_head(rest[:HEAD_BYTES], block_bytes)
    if head.kind is not Prefill or head.following != len(rest) - HEAD_BYTES or split.chunks < parts:
        raise ValueError(f"{len(rest)} bytes behind it are no Prefill of {tokens} tokens in {parts} parts")
    prefill = decode(head, rest[HEAD_BYTES:])
    if not isinstance(prefill, Prefill) or len(prefill.tokens) != split.end:
        raise ValueError(f"its tokens do not end with part {mine}, at {split.end}")
    return Propose(group, split, members, prefill)


def _texts(members: tuple[SplitMember, ...]) -> bytes:
    return "\n".join(f"{member.generation} {member.address}" for member in members).encode()


def _members(raw: bytes) -> tuple[SplitMember, ...]:
    lines = raw.decode().split("\n")
    if not 1 < len(lines) <= MOST_PARTS:
        raise ValueError(f"{len(lines)} nodes, a prompt has 2 to {MOST_PARTS}")
    parts = [line.partition(" ") for line in lines]
    return tuple(SplitMember(int(generation), address) for generation, _, address in parts)
