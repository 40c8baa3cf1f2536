"""A store's index as bytes: a head that says what the blocks are, then one record for each slot of the data file.

Head and records carry their own checksums, so what was written by halves, or changed since, is as good as absent. It
knows no files.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

Name = bytes  # of a block: 16 bytes of a cryptographic hash of what it stands for
Bytes = bytes | bytearray | memoryview
Blocks = Sequence[Sequence[memoryview]]  # of each block its memory, in parts
VERSION = 1
HEAD_BYTES = 4096
_MAGIC = b"afserve disk kv\n"
_HEAD = struct.Struct(
    "<16sIIQQ64s"
)  # magic, version, zero, bytes of a block, from slot to slot, what they are
_RECORD = struct.Struct("<16sQQ")  # name, number of the write, checksum of the block
_CHECK = struct.Struct("<Q")
RECORD_BYTES = _RECORD.size + _CHECK.size
NO_RECORD = bytes(RECORD_BYTES)


@dataclass(frozen=True, slots=True)
class StoreFormat:
    """What all blocks of a store are. `what` is the digest of a KV fingerprint; `pitch` bytes lie between two slots."""

    what: str
    block_bytes: int
    pitch: int


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """`number` counts writes from 1 on, so the slot with the highest one was written last."""

    name: Name
    number: int
    checksum: int


def seed_of(name: Name) -> int:
    """Of a block's checksum: another block's bytes under this name are wrong, too."""
    return int.from_bytes(name[:8], "little")


def checksum_of(name: Name, *parts: Bytes) -> int:
    """XXH3 of a block's bytes, one part behind the other, seeded with the name that it is kept under."""
    seed = seed_of(name)
    checksum: int
    if len(parts) == 1:
        checksum = xxhash.xxh3_64_intdigest(parts[0], seed)
        return checksum
    digest = xxhash.xxh3_64(seed=seed)
    for part in parts:
        digest.update(part)
    checksum = digest.intdigest()
    return checksum


def encode_head(kind: StoreFormat) -> bytes:
    """HEAD_BYTES of them."""
    body = _HEAD.pack(_MAGIC, VERSION, 0, kind.block_bytes, kind.pitch, kind.what.encode())
    return (body + _CHECK.pack(_check(body, 0))).ljust(HEAD_BYTES, b"\0")


def is_head_of(kind: StoreFormat, raw: Bytes) -> bool:
    return bytes(raw) == encode_head(kind)


def encode_record(slot: int, record: BlockRecord) -> bytes:
    body = _RECORD.pack(record.name, record.number, record.checksum)
    return body + _CHECK.pack(_check(body, slot))


def decode_records(raw: Bytes) -> Iterator[tuple[int, BlockRecord]]:
    """(slot, record) of each that is whole; `raw` begins with slot 0, and its end may be missing."""
    view = memoryview(raw)
    for slot in range(len(view) // RECORD_BYTES):
        at = slot * RECORD_BYTES
        body = bytes(view[at : at + _RECORD.size])
        name, number, checksum = _RECORD.unpack(body)
        if number and _CHECK.unpack_from(view, at + _RECORD.size)[0] == _check(body, slot):
            yield slot, BlockRecord(name, number, checksum)


def _check(body: bytes, slot: int) -> int:
    """Seeded with the slot: a record at another place is none."""
    check: int = xxhash.xxh3_64_intdigest(body, slot)
    return check
