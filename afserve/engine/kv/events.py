"""Which blocks a node's cache keeps and drops, with their tokens, for receivers that route by that.

Told are blocks that a sequence of this node made or read. A copy that another node put here is told when a sequence
reads it: the names alone came with it, no tokens. It knows no sockets and no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from afserve.engine.kv.blocks import BlockPool, Hash

MOST_PENDING = 1 << 16  # blocks that wait to be taken; beyond that a receiver begins anew


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that follow each other, by name. `parent` is the one before them; None where a sequence begins. Where that
    is not told, because it was dropped meanwhile, `before` has the tokens of all blocks up to it."""

    names: tuple[Hash, ...]
    parent: Hash | None
    tokens: tuple[int, ...]
    salt: str
    before: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    names: tuple[Hash, ...]


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """All that was told before is void."""


CacheEvent = BlocksStored | BlocksRemoved | BlocksCleared


class CacheEvents:
    """Begins with `BlocksCleared`: whoever took this node for an earlier one knows that it has nothing."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._told: set[Hash] = set()
        self._pending: list[CacheEvent] = [BlocksCleared()]
        self._went: list[Hash] = []  # since the last of those
        self._waiting = 0  # blocks in both

    def stored(self, names: Sequence[Hash], tokens: Sequence[int], first: int, last: int, salt: str) -> None:
        """A sequence of these tokens begins with `names`; those in [first, last) it has just filled or found. Told are
        the ones that can be found and were not told yet."""
        begin = first
        for index in range(first, last + 1):
            if index == last or names[index] in self._told or not self._pool.knows(names[index]):
                if begin < index:
                    self._store(names, tokens, begin, index, salt)
                begin = index + 1

    def _store(self, names: Sequence[Hash], tokens: Sequence[int], first: int, last: int, salt: str) -> None:
        size, stored = self._pool.block_size, tuple(names[first:last])
        parent = names[first - 1] if first else None
        before = () if parent is None or parent in self._told else tuple(tokens[: first * size])
        self._told.update(stored)
        told = BlocksStored(stored, parent, tuple(tokens[first * size : last * size]), salt, before)
        self._add(told, len(stored))

    def gone(self, name: Hash) -> None:
        """It can no longer be found. May be said of any block."""
        if name not in self._told:
            return
        self._told.remove(name)
        self._went.append(name)
        self._count(1)

    def _add(self, event: CacheEvent, blocks: int) -> None:
        self._flush()
        self._pending.append(event)
        self._count(blocks)

    def _flush(self) -> None:
        if self._went:
            self._pending.append(BlocksRemoved(tuple(self._went)))
            self._went.clear()

    def _count(self, blocks: int) -> None:
        self._waiting += blocks
        if self._waiting > MOST_PENDING:
            self.begin_anew()

    def begin_anew(self) -> None:
        """What was told and what waits is void: blocks are told when a sequence uses them next."""
        self._told.clear()
        self._went.clear()
        self._pending, self._waiting = [BlocksCleared()], 0

    def take_news(self) -> list[CacheEvent]:
        """Since the last call."""
        self._flush()
        pending, self._pending, self._waiting = self._pending, [], 0
        return pending
