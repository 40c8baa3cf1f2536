"""A digest of many tensors that depends neither on their order nor on the files they lie in. Without torch.

Of each tensor its name, dtype, shape and either samples of its bytes or all of them. How many samples are enough is
told in `identity`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from afserve.digest_cache import Digest
from afserve.models.shards import ShardFile, StoredTensor

SAMPLES, SAMPLE_BYTES, WHOLE_BYTES = 4, 64, 16 << 10
HOW = f"{SAMPLES}x{SAMPLE_BYTES}:{WHOLE_BYTES}"
_BLOCK = 4 << 20
_MODULO = 1 << 256
_TOTAL, _COUNT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Tally:
    """Of some tensors: the sum of their digests, so that no order matters; how many; their dtypes."""

    total: int = 0
    count: int = 0
    dtypes: frozenset[str] = frozenset()

    def __add__(self, other: "Tally") -> "Tally":
        total = (self.total + other.total) % _MODULO
        return Tally(total, self.count + other.count, self.dtypes | other.dtypes)

    def __str__(self) -> str:
        digest = blake2b(self.total.to_bytes(32, "little"), digest_size=8).hexdigest()
        return f"{digest} ({self.count:,} tensors of {', '.join(sorted(self.dtypes)) or 'nothing'})"

    def entry(self) -> Digest:
        return {
            "total": f"{self.total:064x}",
            "count": str(self.count),
            "dtypes": ",".join(sorted(self.dtypes)),
        }

    @classmethod
    def of_entry(cls, entry: Digest | None) -> "Tally | None":
        """None for an entry that `entry` has not made."""
        if entry is None or entry.keys() != {"total", "count", "dtypes"}:
            return None
        if not _TOTAL.fullmatch(entry["total"]) or not _COUNT.fullmatch(entry["count"]):
            return None
        return cls(
            int(entry["total"], 16), int(entry["count"]), frozenset(filter(None, entry["dtypes"].split(",")))
        )


def sampled(stored: StoredTensor, file: ShardFile) -> Tally:
    """By all of a small tensor, and by bytes at places that follow from the name of a larger one."""
    return _tally(stored, _samples(stored, file))


def complete(stored: StoredTensor, file: ShardFile) -> Tally:
    """By every byte."""
    return _tally(stored, _blocks(stored, file))


def _tally(stored: StoredTensor, pieces: Iterable[bytes]) -> Tally:
    digest = blake2b(f"{stored.name}\0{stored.dtype}\0{stored.shape}\0".encode(), digest_size=32)
    for piece in pieces:
        digest.update(piece)
    return Tally(int.from_bytes(digest.digest(), "little"), 1, frozenset({stored.dtype}))


def _samples(stored: StoredTensor, file: ShardFile) -> Iterator[bytes]:
    size = stored.end - stored.begin
    if size <= WHOLE_BYTES:
        yield file.read(size, stored.begin)
        return
    seed = blake2b(stored.name.encode(), digest_size=8 * SAMPLES).digest()
    for number in range(SAMPLES):
        drawn = int.from_bytes(seed[8 * number : 8 * number + 8], "little")
        yield file.read(SAMPLE_BYTES, stored.begin + drawn % (size - SAMPLE_BYTES + 1))


def _blocks(stored: StoredTensor, file: ShardFile) -> Iterator[bytes]:
    for begin in range(stored.begin, stored.end, _BLOCK):
        yield file.read(min(_BLOCK, stored.end - begin), begin)
