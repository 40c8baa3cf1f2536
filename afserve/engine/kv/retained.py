"""Blocks that somebody asked to keep for some time: they are evicted after all others, and stand in nobody's way.

Half of the blocks at most are kept so. Beyond that the owner who has most of them loses the one that was released
first: it is an ordinary cached block from then on. E.g. of 1,000 blocks with 400 kept for one key and 100 for another,
a further one of either costs the first key one.
"""

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass

from afserve.clock import Clock, MonotonicClock

SHARE = 2  # one of so many blocks
Released = tuple[int, int]  # a block, and the number of its release


@dataclass(frozen=True, slots=True)
class Retention:
    """For `seconds` from when nobody holds the block any more, on account of `owner`."""

    owner: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Owned:
    """What `owner` keeps: `blocks`, of which requests read some now, the last one for `seconds` more."""

    owner: str
    blocks: int
    seconds: float


class _BySize:
    """Owners by how many blocks they keep. Each change is of one block, however many owners there are."""

    def __init__(self) -> None:
        self._owners: dict[int, dict[str, None]] = {}
        self._most = 0

    def change(self, owner: str, before: int, after: int) -> None:
        if before:
            del self._owners[before][owner]
            if not self._owners[before]:
                del self._owners[before]
        if after:
            self._owners.setdefault(after, {})[owner] = None
        if after > self._most or self._most not in self._owners:
            self._most = after

    def fullest(self) -> str:
        """Of several the one that has had so many for longest."""
        return next(iter(self._owners[self._most]))


class RetainedBlocks:
    def __init__(self, blocks: int, clock: Clock | None = None) -> None:
        self._most, self._clock = blocks // SHARE, clock or MonotonicClock()
        self._asked: dict[int, tuple[str, float]] = {}  # by block, held ones too: whose, and until when
        self._idle: dict[str, OrderedDict[int, int]] = {}  # by owner, in the order of release
        self._sizes = _BySize()
        self._count = 0
        self._next = float("inf")  # nothing that is kept ends before

    def __len__(self) -> int:
        """Those that nobody holds."""
        return self._count

    def __iter__(self) -> Iterator[int]:
        for blocks in self._idle.values():
            yield from blocks

    def released(self) -> list[Released]:
        """Those that nobody holds."""
        return [one for blocks in self._idle.values() for one in blocks.items()]

    def __contains__(self, block: int) -> bool:
        asked = self._asked.get(block)
        return asked is not None and block in self._idle.get(asked[0], ())

    def ask(self, block: int, wanted: Retention) -> None:
        """Of one that is held. The longest wish counts."""
        until = self._clock.now() + wanted.seconds
        if (before := self._asked.get(block)) is None or before[1] < until:
            self._asked[block] = wanted.owner, until

    def asks(self, block: int) -> bool:
        """Whether somebody wants it to stay now, held or not."""
        asked = self._asked.get(block)
        return asked is not None and asked[1] > self._clock.now()

    def keep_idle(self, block: int, released: int) -> bool:
        """Whether it is kept: nobody holds it any more."""
        asked = self._asked.get(block)
        if asked is None or not self._most or asked[1] <= self._clock.now():
            self._asked.pop(block, None)
            return False
        blocks = self._idle.setdefault(asked[0], OrderedDict())
        blocks[block] = released
        self._sizes.change(asked[0], len(blocks) - 1, len(blocks))
        self._count += 1
        self._next = min(self._next, asked[1])
        return True

    def hold(self, block: int) -> None:
        """Somebody holds it again. It is still asked for."""
        if block in self:
            self._take(self._asked[block][0], block)

    def drop(self, block: int) -> None:
        """It has another content from now on."""
        self.hold(block)
        self._asked.pop(block, None)

    def _take(self, owner: str, block: int) -> int:
        blocks = self._idle[owner]
        released = blocks.pop(block)
        self._sizes.change(owner, len(blocks) + 1, len(blocks))
        if not blocks:
            del self._idle[owner]
        self._count -= 1
        return released

    def surplus(self) -> list[Released]:
        """What is kept no longer: those whose time has passed, and those beyond the share."""
        found: list[Released] = []
        if (now := self._clock.now()) >= self._next:
            over = [(self._asked[block][0], block) for block in self if self._asked[block][1] <= now]
            found += [self._let_go(owner, block) for owner, block in over]
            self._next = min((self._asked[block][1] for block in self), default=float("inf"))
        while self._count > self._most:
            found.append(self.give_up())
        return found

    def give_up(self) -> Released:
        """The one that was released first, of the owner who has most."""
        owner = self._sizes.fullest()
        return self._let_go(owner, next(iter(self._idle[owner])))

    def owned(self) -> list[Owned]:
        """Who keeps what, by name."""
        now = self._clock.now()
        found: dict[str, list[float]] = {}
        for owner, until in self._asked.values():
            if until > now:
                found.setdefault(owner, []).append(until - now)
        return [Owned(owner, len(left), max(left)) for owner, left in sorted(found.items())]

    def let_go_of(
        self, owner: str | None, wanted: Container[int] | None = None
    ) -> tuple[int, list[Released]]:
        """Nothing of it is kept any longer, of nobody's where it is None, of the `wanted` blocks alone where these are
        said: how many that were, and those of them that nobody holds."""
        blocks = [block for block, (whose, _) in self._asked.items() if owner is None or whose == owner]
        blocks = [block for block in blocks if wanted is None or block in wanted]
        idle = [self._let_go(self._asked[block][0], block) for block in blocks if block in self]
        for block in blocks:
            self._asked.pop(block, None)
        return len(blocks), idle

    def _let_go(self, owner: str, block: int) -> Released:
        released = self._take(owner, block)
        del self._asked[block]
        return block, released
