"""What others hear of a node's cache: gateways which beginnings it has, and receivers of KV events each block."""

from collections.abc import Sequence

from afserve.engine.kv.blocks import BlockPool, Hash
from afserve.engine.kv.events import CacheEvents
from afserve.engine.kv.prefix_keys import HeldPrefixes, extend
from afserve.kv_events_config import kv_events_of


class ToldCache:
    """`events` is there where --kv-events (`asked`) wants them."""

    def __init__(self, pool: BlockPool, asked: str = "") -> None:
        self.prefixes = HeldPrefixes()
        self.events = None if kv_events_of(asked) is None else CacheEvents(pool)
        self._size = pool.block_size

    def filled(
        self, names: Sequence[Hash], keys: list[int], tokens: Sequence[int], first: int, last: int, salt: str
    ) -> None:
        """A sequence of these tokens has filled or found its blocks in [first, last), all before them too. `names` has
        those of them all, and `keys` is extended by those of beginnings that are whole now."""
        for end, key in extend(keys, tokens, last, self._size, salt):
            self.prefixes.filled(names[end - 1], key)
        if self.events is not None:
            self.events.stored(names, tokens, first, last, salt)

    def gone(self, name: Hash) -> None:
        """It can no longer be found. May be said of any block."""
        self.prefixes.gone(name)
        if self.events is not None:
            self.events.gone(name)
