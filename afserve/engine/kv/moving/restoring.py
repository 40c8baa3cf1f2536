"""Requests whose beginning is in a tier below this node's cache: read into it before they are scheduled.

So much of it is read as is predicted to come sooner than the tokens can be computed again, by rates measured here for
each tier, and for no longer than that would take. It stands around what moves between nodes (`moves`), which comes
first. It knows neither memory nor files.
"""

from collections.abc import Callable, Iterable, Sequence

from afserve.clock import Clock
from afserve.comm.kv.source import KvSource
from afserve.comm.kv.split import SplitMember
from afserve.engine.kv.moving.moves import LEAST_SECONDS, MOST_SECONDS, UNKNOWN_SECONDS, KvMoves
from afserve.engine.kv.moving.seams import KvEngine
from afserve.engine.kv.tiers import DISK, HOST, KvTiers, Restored
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent
from afserve.engine.stats import KvStats, TierStats
from afserve.trace import KV_BLOCKS

_START_SECONDS = 0.001  # of a restoration, whatever its size
_WEIGHT = 0.3  # of the newest one in the measured rate
_AGAIN = 1.5  # a tier that was too slow is tried again: with each refusal it is thought faster by so much
_SHARE, _LONGEST, _IDLE = 0.1, 0.01, 0.02  # of a busy node's time, seconds of it at a time, of an idle one's
_NAMES = {HOST: "host memory", DISK: "the disk"}
Places = Sequence[tuple[str, int]]  # how many blocks, from the first on, are in which tier


class KvInTiers:
    """A `KvSide`; `tell` takes lines for the run's log."""

    def __init__(
        self,
        moves: KvMoves,
        tiers: KvTiers,
        node: KvEngine,
        clock: Clock,
        block_size: int,
        block_bytes: int,
        tell: Callable[[str], None] = lambda line: None,
        most: int = 1024,
    ) -> None:
        """`most` requests wait for tiers at once; more are the scheduler's to take or to refuse."""
        self._most = most
        self._moves, self._tiers, self._node, self._clock, self._tell = moves, tiers, node, clock, tell
        self._block_size, self._block_bytes = block_size, block_bytes
        self._waiting: dict[int, list[GenerationRequest]] = {}  # by the restoration's number
        self._sources: dict[int, KvSource] = {}  # who computes the rest, of those that wait, by handle
        self._rates: dict[str, float] = {}  # bytes per second of the restorations so far, by tier
        self._turned = clock.now()
        moves.over(self)

    @property
    def busy(self) -> bool:
        return self._moves.busy or self._tiers.busy

    @property
    def eager(self) -> bool:
        return self._moves.eager

    @property
    def holding(self) -> bool:
        return self._moves.holding

    def computed(self, event: TokenEvent) -> None:
        self._moves.computed(event)

    def pull(self, request: GenerationRequest, source: KvSource) -> bool:
        """Where another node is to compute the prompt, it is asked for what the tiers have not."""
        if source.prefills and self.restore(request):
            self._sources[request.handle] = source
            return True
        return self._moves.pull(request, source)

    def restore(self, request: GenerationRequest) -> bool:
        names = self._node.usable_names(request)
        places = self._tiers.look(names)
        if not places or sum(map(len, self._waiting.values())) >= self._most:
            return False
        blocks = self._worth(places)
        if self._computing(sum(count for _, count in places)) > 2 * _START_SECONDS:
            for tier in _behind(places, blocks):  # of fewer tokens no tier would be fast enough
                self._rates[tier] *= _AGAIN
        if not blocks:
            return False
        limit = min(MOST_SECONDS, max(LEAST_SECONDS, self._computing(blocks) or UNKNOWN_SECONDS))
        number = self._tiers.restore(names, limit, blocks)
        if number is not None:
            self._waiting.setdefault(number, []).append(request)
        return number is not None

    def _worth(self, places: Places) -> int:
        """How many blocks to read, so that the tokens are there soonest: all where not everything was measured yet."""
        if not self._node.prefill_rate or any(not self._rates.get(tier) for tier, _ in places):
            return sum(count for _, count in places)
        best, most, blocks, reading = 0, 0.0, 0, _START_SECONDS
        for tier, count in places:
            blocks += count
            reading += count * self._block_bytes / self._rates[tier]
            if (saved := self._computing(blocks) - reading) > most:
                best, most = blocks, saved
        return best

    def _computing(self, blocks: int) -> float:
        """Seconds to compute so many blocks; 0 where that was not measured yet."""
        rate = self._node.prefill_rate
        return blocks * self._block_size / rate if rate else 0.0

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
                self._tiers.cancel(restoration)

    def copy_to(self, peers: Iterable[SplitMember]) -> None:
        self._moves.copy_to(peers)

    def turn(self) -> list[GenerationRequest]:
        """What was pulled from another node may go on here: its beginning may be in a tier."""
        now = self._clock.now()
        took, self._turned = now - self._turned, now
        ready = []
        moved = [request for request in self._moves.turn() if not self.restore(request)]
        if self._tiers.busy:
            self._tiers.turn(min(_SHARE * took, _LONGEST) if self._node.busy else _IDLE)
        ended = list(self._tiers.ended)
        self._tiers.ended.clear()
        for restored in ended:
            if (waited := self._waiting.pop(restored.job, None)) is not None:
                self._note(waited[0], restored)
                # The others may go on where the first one's beginning ends, if anything came at all.
                again = any(restored.received.values())
                ready += [waited[0], *(other for other in waited[1:] if not (again and self.restore(other)))]
        for request in ready:
            if request.handle < 0:
                self._moves.restored(request)
            elif not self._handed(request):
                moved.append(request)
        return moved

    def _handed(self, request: GenerationRequest) -> bool:
        """Whether it waits for the rest of its prompt, now that the tiers have given what they have."""
        source = self._sources.pop(request.handle, None)
        return source is not None and self._moves.pull(request, source)

    def _note(self, request: GenerationRequest, restored: Restored) -> None:
        received, asked = sum(restored.received.values()), sum(restored.asked.values())
        self._measure(restored)
        where = " and ".join(_NAMES[tier] for tier in restored.asked)
        if received < asked:
            self._tell(
                f"request {request.handle}: {received} of {asked} blocks came from {where} in "
                f"{1e3 * restored.seconds:.1f} ms; {(asked - received) * self._block_size:,} tokens are computed again"
            )
        self._node.draw(KV_BLOCKS, f"{received} blocks from {where}", restored.seconds)

    def _measure(self, restored: Restored) -> None:
        """Of a restoration from several tiers the farthest one took the time."""
        tier = DISK if restored.asked.get(DISK) else HOST
        received = restored.received.get(tier, 0)
        if restored.seconds > 0 and (received or restored.seconds >= LEAST_SECONDS):
            rate, before = max(1, received) * self._block_bytes / restored.seconds, self._rates.get(tier)
            self._rates[tier] = rate if not before else before + _WEIGHT * (rate - before)

    def stats(self) -> KvStats:
        return self._moves.stats()

    def tiers(self) -> TierStats:
        return self._tiers.stats()

    def close(self) -> None:
        self._moves.close()
        self._tiers.close()


def _behind(places: Places, blocks: int) -> set[str]:
    """The tiers of what comes after so many blocks."""
    found = set()
    for tier, count in places:
        if blocks <= 0:
            found.add(tier)
        blocks -= count
    return found
