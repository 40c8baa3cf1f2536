"""Blocks that were brought for requests which have not begun yet: they are evicted after all others.

A request that came behind others waits for its turn after its blocks have come. Until it begins they stand in nobody's
way, but all else goes first. They are half of the blocks at most; what comes beyond that is ordinary at once. Where
even they have to go, those of the request that came last do, from the end of its chain on.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from afserve.clock import Clock, MonotonicClock
from afserve.engine.kv.retained import Released

SHARE = 2  # one of so many blocks
LEFT = 32  # one of so many blocks stays for who runs, whatever waits
SECONDS = 30.0  # a request that has not begun by then, or never comes, loses its claim


class AwaitedBlocks:
    """Of blocks that nobody holds."""

    def __init__(self, blocks: int, clock: Clock | None = None) -> None:
        self._blocks, self._most, self._clock = blocks, blocks // SHARE, clock or MonotonicClock()
        # the number of the release, and until when
        self._idle: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[int]:
        return iter(self._idle)

    def __contains__(self, block: int) -> bool:
        return block in self._idle

    def room_for(self, chain: int, coming: int, available: int) -> bool:
        """Whether a chain of so many blocks may be brought now: nothing that others wait for makes room for it, also
        once what is `coming` is here, and all of it can be kept. `available` blocks are held by nobody; where that is
        all, there is as much room as there ever is."""
        waits, rest = len(self._idle) + coming, available - len(self._idle) - self._blocks // LEFT
        if available == self._blocks:
            return True
        return chain <= rest and (not waits or waits + chain <= self._most)

    def keep_chain(self, chain: Iterable[Released]) -> list[Released]:
        """These, in the order of their chain; those for which there is no room."""
        until, beyond = self._clock.now() + SECONDS, list[Released]()
        for block, released in chain:
            if len(self._idle) < self._most:
                self._idle[block] = released, until
            else:
                beyond.append((block, released))
        return beyond

    def let_go(self, block: int) -> None:
        """It is held now, or has another content. May be said of any block."""
        self._idle.pop(block, None)

    def give_up_newest(self) -> Released:
        """The end of the chain that came last."""
        block, (released, _) = self._idle.popitem()
        return block, released

    def take_late_ones(self) -> list[Released]:
        """Those whose time has passed."""
        found, now = list[Released](), self._clock.now()
        while self._idle and next(iter(self._idle.values()))[1] <= now:
            block, (released, _) = self._idle.popitem(last=False)
            found.append((block, released))
        return found
