"""Which beginnings of prompts a node has, in words that a gateway understands: it knows tokens, no block names.

A beginning has a key, a hash of its tokens and its salt. Keys are made of the first 16 lengths in whole blocks, and of
every 16th behind them, so a prompt of 4,096 tokens in blocks of 16 has 31. A node says which keys came and went. It
knows no tensors and no sockets.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from afserve.engine.kv.blocks import Hash

FINE, COARSE = 16, 16  # blocks that have a key each, and how many share one behind those
MOST_HELD = 1 << 16  # keys that a node tells of
_BYTES = 8
_PERSON = b"afserve-prefix"


def keys_of(tokens: Sequence[int], block: int, salt: str = "") -> Iterator[tuple[int, int]]:
    """(key, tokens) of each beginning that has one, from short to long. Numbers that are no token ids have none."""
    try:
        data = array("I", tokens).tobytes()
    except OverflowError:
        return
    key = _root(salt)
    for count in range(marks(len(tokens) // block)):
        start, end = _blocks(count) * block, _blocks(count + 1) * block
        key = _next(key, data[4 * start : 4 * end])
        yield key, end


def marks(blocks: int) -> int:
    """How many keys a beginning of so many blocks has."""
    return blocks if blocks <= FINE else FINE + (blocks - FINE) // COARSE


def _blocks(count: int) -> int:
    """Of the beginning with the key of this number, counted from 1; none has none."""
    return count if count <= FINE else FINE + COARSE * (count - FINE)


def _root(salt: str) -> int:
    return _next(0, salt.encode()) if salt else 0


def _next(key: int, data: bytes) -> int:
    digest = hashlib.blake2b(key.to_bytes(_BYTES, "little") + data, digest_size=_BYTES, person=_PERSON)
    return int.from_bytes(digest.digest(), "little")


def extend(
    keys: list[int], tokens: Sequence[int], blocks: int, block: int, salt: str
) -> Iterator[tuple[int, int]]:
    """(number of blocks, key) of the beginnings up to `blocks` whose keys are not in `keys` yet, which is extended."""
    for count in range(len(keys), marks(blocks)):
        start, end = _blocks(count), _blocks(count + 1)
        data = array("I", tokens[start * block : end * block]).tobytes()
        keys.append(_next(keys[-1] if keys else _root(salt), data))
        yield end, keys[-1]


class HeldPrefixes:
    """A node's cache, and the tiers below it, as keys. A beginning is held while its last block can be found: tails are
    evicted first."""

    def __init__(self, most: int = MOST_HELD) -> None:
        self._most = most
        # by the name of the last block, the eldest first
        self._key_of: OrderedDict[Hash, int] = OrderedDict()
        self._came: dict[int, None] = {}  # since the last `take`; the order is that in which they came
        self._went: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, name: Hash) -> bool:
        return name in self._key_of

    def names(self) -> list[Hash]:
        """Of the last blocks of all beginnings that are held."""
        return list(self._key_of)

    def keys_of(self, names: Sequence[Hash]) -> list[int]:
        """Of each the key of the beginning that ends there, or 0."""
        return [self._key_of.get(name, 0) for name in names]

    def filled(self, name: Hash, key: int) -> None:
        """The block of this name is the last of a beginning; all of them are here."""
        if name in self._key_of:
            self._key_of.move_to_end(name)
            return
        self._key_of[name] = key
        if key in self._went:
            del self._went[key]
        else:
            self._came[key] = None
        if len(self._key_of) > self._most:
            self.gone(next(iter(self._key_of)))

    def gone(self, name: Hash) -> None:
        """May be said of any block."""
        key = self._key_of.pop(name, None)
        if key is None:
            return
        if key in self._came:
            del self._came[key]
        else:
            self._went[key] = None

    @property
    def changed(self) -> bool:
        return bool(self._came or self._went)

    def take(self) -> tuple[list[int], list[int]]:
        """The keys that came and those that went since the last call."""
        found = list(self._came), list(self._went)
        self._came.clear()
        self._went.clear()
        return found

    def all(self) -> list[int]:
        """Every key that is held, the eldest first."""
        return list(self._key_of.values())
