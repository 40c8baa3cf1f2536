"""Disks of nodes of this host that have ended: what is on them is another node's from then on, to be read.

A node that comes back within a minute has its own files again. Whoever looks first has them; a node that wants them
later begins with empty ones, and gets blocks from there as from any other node. Nothing more is written to them.
"""

from collections.abc import Callable

from afserve.adviser import Adviser
from afserve.clock import Clock
from afserve.comm.disk.store import DiskStore
from afserve.comm.disk.workers import DiskWorkers
from afserve.engine.kv.disk import DiskTier
from afserve.engine.kv.kept_keys import KeptKeys
from afserve.engine.kv.store import PooledBlocks
from afserve.engine.kv.tiers import KvTiers
from afserve.engine.kv.told import ToldCache

SECONDS = 60.0  # between two looks, and before the first
MOST = 8  # that one node reads


class Inheritance:
    """`start` makes what reads a store's files, and starts it. `tell` takes lines for the run's log."""

    def __init__(
        self,
        own: DiskStore,
        limit: int,
        start: Callable[[DiskStore], DiskWorkers],
        tiers: KvTiers,
        blocks: PooledBlocks,
        told: ToldCache,
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        self._own, self._limit, self._start, self._tiers = own, limit, start, tiers
        self._blocks, self._told, self._clock, self._tell = blocks, told, clock, tell
        self._looked, self._count = clock.now(), 0
        self._advice = Adviser("taking over what ended nodes have left on the disk")

    def look(self) -> None:
        """Once per turn of the node's loop."""
        now = self._clock.now()
        if now - self._looked >= SECONDS and self._count < MOST:
            self._looked = now
            self._advice.ask(now, self._take, None)

    def _take(self) -> None:
        store = self._own.left_beside(self._limit)
        if store is None:
            return
        self._count += 1
        self._tiers.add(DiskTier(self._blocks, self._start(store), self._clock, reads=True))
        self._told.know(KeptKeys(store.folder / "keys"))
        self._tell(
            f"KV on disk: {store.folder}, which an ended node has left, is read here: {store.blocks:,} blocks"
        )
