"""Requests whose beginning is on this node's disk: read into memory before they are scheduled.

It is read where that is predicted to be faster than to compute the tokens again, by rates measured here, and for no
longer than that would take. It stands around the node's exchange with others (`kv`), which comes first. It knows no
files.
"""

from collections.abc import Callable
from typing import Protocol

from afserve.clock import Clock
from afserve.comm.kv.messages import Name
from afserve.control.node.kv import LEAST_SECONDS, MOST_SECONDS, UNKNOWN_SECONDS, KvMoves, MovingNode
from afserve.control.wire.values import AttentionNodes, KvSource
from afserve.engine.kv_disk import Restored
from afserve.engine.request import GenerationRequest, TokenEvent
from afserve.engine.stats import KvStats, TierStats

_START_SECONDS = 0.001  # of a restoration, whatever its size
_WEIGHT = 0.3  # of the newest one in the measured rate
_AGAIN = 1.5  # a disk that was too slow is tried again: with each refusal it is thought faster by so much
_SHARE, _LONGEST, _IDLE = 0.1, 0.01, 0.02  # of a busy node's time, seconds of it at a time, of an idle one's


class Tier(Protocol):
    """What this needs of `engine.kv_disk.DiskTier`."""

    ended: list[Restored]

    @property
    def busy(self) -> bool: ...
    def waits_on_disk(self, names: list[Name]) -> int: ...
    def restore(self, names: list[Name], limit: float) -> int | None: ...
    def cancel(self, number: int) -> None: ...
    def turn(self, seconds: float) -> None: ...
    def stats(self) -> TierStats: ...
    def close(self) -> None: ...


class KvOnDisk:
    """A `KvSide`; `tell` takes lines for the run's log."""

    def __init__(
        self,
        moves: KvMoves,
        tier: Tier,
        node: MovingNode,
        clock: Clock,
        block_size: int,
        block_bytes: int,
        tell: Callable[[str], None] = lambda line: None,
        most: int = 1024,
    ) -> None:
        """`most` requests wait for the disk at once; more are the scheduler's to take or to refuse."""
        self._most = most
        self._moves, self._tier, self._node, self._clock, self._tell = moves, tier, node, clock, tell
        self._block_size, self._block_bytes = block_size, block_bytes
        self._waiting: dict[int, list[GenerationRequest]] = {}  # by the restoration's number
        self._sources: dict[int, KvSource] = {}  # who computes the rest, of those that wait, by handle
        self._rate = 0.0  # bytes per second of the restorations so far
        self._turned = clock.now()

    @property
    def busy(self) -> bool:
        return self._moves.busy or self._tier.busy

    @property
    def eager(self) -> bool:
        return self._moves.eager

    @property
    def holding(self) -> bool:
        return self._moves.holding

    def computed(self, event: TokenEvent) -> None:
        self._moves.computed(event)

    def pull(self, request: GenerationRequest, source: KvSource) -> bool:
        """Where another node is to compute the prompt, it is asked for what the disk has not."""
        if source.prefills and self.restore(request):
            self._sources[request.handle] = source
            return True
        return self._moves.pull(request, source)

    def restore(self, request: GenerationRequest) -> bool:
        names = self._node.usable_names(request)
        blocks = self._tier.waits_on_disk(names)
        if not blocks or sum(map(len, self._waiting.values())) >= self._most:
            return False
        reading, again = self._predict(blocks)
        if reading and again and reading >= again:
            if again > 2 * _START_SECONDS:  # else no disk would be fast enough
                self._rate *= _AGAIN
            return False
        limit = min(MOST_SECONDS, max(LEAST_SECONDS, again or UNKNOWN_SECONDS))
        number = self._tier.restore(names, limit)
        if number is not None:
            self._waiting.setdefault(number, []).append(request)
        return number is not None

    def _predict(self, blocks: int) -> tuple[float, float]:
        """Seconds to read so many blocks and to compute them; 0 for what was not measured yet."""
        reading = _START_SECONDS + blocks * self._block_bytes / self._rate if self._rate else 0.0
        rate = self._node.prefill_rate
        return reading, blocks * self._block_size / rate if rate else 0.0

    def part(self, number: int) -> None:
        self._moves.part(number)

    def cancel(self, number: int) -> None:
        self._moves.cancel(number)
        self._sources.pop(number, None)
        for restoration, requests in list(self._waiting.items()):
            left = [request for request in requests if request.handle != number]
            if left:
                self._waiting[restoration] = left
            else:
                del self._waiting[restoration]
                self._tier.cancel(restoration)

    def told(self, nodes: AttentionNodes) -> None:
        self._moves.told(nodes)

    def turn(self) -> list[GenerationRequest]:
        """What was pulled from another node may go on here: its beginning may be on the disk."""
        now = self._clock.now()
        took, self._turned = now - self._turned, now
        ready = []
        moved = [request for request in self._moves.turn() if not self.restore(request)]
        if self._tier.busy:
            self._tier.turn(min(_SHARE * took, _LONGEST) if self._node.busy else _IDLE)
        ended = list(self._tier.ended)
        self._tier.ended.clear()
        for restored in ended:
            if (waited := self._waiting.pop(restored.job, None)) is not None:
                self._note(waited[0], restored)
                # The others may go on where the first one's beginning ends, if the disk gave anything at all.
                again = restored.received > 0
                ready += [waited[0], *(other for other in waited[1:] if not (again and self.restore(other)))]
        return moved + [request for request in ready if not self._handed(request)]

    def _handed(self, request: GenerationRequest) -> bool:
        """Whether it waits for the rest of its prompt, now that the disk has given what it has."""
        source = self._sources.pop(request.handle, None)
        return source is not None and self._moves.pull(request, source)

    def _note(self, request: GenerationRequest, restored: Restored) -> None:
        if restored.seconds > 0 and (restored.received or restored.seconds >= LEAST_SECONDS):
            rate = max(1, restored.received) * self._block_bytes / restored.seconds
            self._rate = rate if not self._rate else self._rate + _WEIGHT * (rate - self._rate)
        if restored.received < restored.asked:
            missing = (restored.asked - restored.received) * self._block_size
            self._tell(
                f"request {request.handle}: {restored.received} of {restored.asked} blocks came from the disk in "
                f"{1e3 * restored.seconds:.1f} ms; {missing:,} tokens are computed again"
            )
        what = f"{restored.received} blocks from the disk"
        self._node.draw("KV blocks", what, self._clock.now() - restored.seconds)

    def stats(self) -> KvStats:
        return self._moves.stats()

    def tiers(self) -> TierStats:
        return self._tier.stats()

    def close(self) -> None:
        self._moves.close()
        self._tier.close()
