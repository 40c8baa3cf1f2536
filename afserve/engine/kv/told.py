"""What others hear of a node's cache: gateways which beginnings it has, there or below it, and receivers of KV events
each block that is in the cache."""

from collections.abc import Callable, Sequence

from afserve.engine.kv.blocks import BlockPool, Hash
from afserve.engine.kv.events import CacheEvents
from afserve.engine.kv.kept_keys import KeptKeys
from afserve.engine.kv.prefix_keys import HeldPrefixes, extend
from afserve.kv_events_config import kv_events_of

_SWEPT = 32  # beginnings that are looked for below the cache in one look
Holds = Callable[[Sequence[Hash]], list[bool]]


class ToldCache:
    """`events` is there where --kv-events (`asked`) wants them."""

    def __init__(self, pool: BlockPool, asked: str = "") -> None:
        self.prefixes = HeldPrefixes()
        self.events = None if kv_events_of(asked) is None else CacheEvents(pool)
        self._pool, self._size = pool, pool.block_size
        self._below: Holds | None = None
        self._keys: KeptKeys | None = None
        self._unswept: list[Hash] = []

    def look_below(self, holds: Holds, keys: KeptKeys | None) -> None:
        """Tiers hold what leaves the cache; `keys` are those of what is on the disk since before."""
        self._below, self._keys = holds, keys
        if keys is not None:
            self.know(keys)

    def know(self, keys: KeptKeys) -> None:
        """Those of what else is below the cache since before."""
        assert self._below is not None
        noted = list(keys.read_all())
        for (name, key), here in zip(noted, self._below([name for name, _ in noted]), strict=True):
            if here:
                self.prefixes.filled(name, key)
            else:
                keys.forget(name)

    def filled(
        self, names: Sequence[Hash], keys: list[int], tokens: Sequence[int], first: int, last: int, salt: str
    ) -> None:
        """A sequence of these tokens has filled or found its blocks in [first, last), all before them too. `names` has
        those of them all, and `keys` is extended by those of beginnings that are whole now."""
        for end, key in extend(keys, tokens, last, self._size, salt):
            self.prefixes.filled(names[end - 1], key)
            if self._keys is not None:
                self._keys.note(names[end - 1], key)
        if self.events is not None:
            self.events.stored(names, tokens, first, last, salt)

    def inherited(self, blocks: Sequence[tuple[Hash, int]]) -> None:
        """Blocks with their keys, or 0, that came from a node which leaves."""
        for name, key in blocks:
            if key:
                self.prefixes.filled(name, key)

    def gone(self, name: Hash) -> None:
        """It can no longer be found in the cache. May be said of any block."""
        if name in self.prefixes and not (self._below is not None and self._below([name])[0]):
            self._forget(name)
        if self.events is not None:
            self.events.gone(name)

    def look(self) -> None:
        """Now and then: what has left the tiers meanwhile is told, and what is to be known after a restart noted."""
        if self._below is None:
            return
        if not self._unswept:
            self._unswept = self.prefixes.names()
        names, self._unswept = self._unswept[-_SWEPT:], self._unswept[:-_SWEPT]
        for name, below in zip(names, self._below(names), strict=True):
            if not below and not self._pool.knows(name):
                self._forget(name)
        if self._keys is not None:
            self._keys.write()

    def _forget(self, name: Hash) -> None:
        self.prefixes.gone(name)
        if self._keys is not None:
            self._keys.forget(name)
