"""Requests whose beginning is in a tier below this node's cache: read into it before they are scheduled.

So much of it is read as is predicted to come sooner than the tokens can be computed again, by rates measured here for
each tier, and for no longer than that would take. It stands around what moves between nodes (`moves`), which comes
first. It knows neither memory nor files.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from afserve.clock import Clock
from afserve.comm.kv.source import KvSource
from afserve.comm.kv.split import SplitMember
from afserve.engine.kv.moving.jobs import LEAST_SECONDS, Job, Jobs, TurnTime, limit_of
from afserve.engine.kv.moving.moves import KvMoves
from afserve.engine.kv.moving.seams import KvEngine
from afserve.engine.kv.tiers import DISK, HOST, KvTiers, Restored
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent
from afserve.engine.stats import KvStats, TierStats, smoothed
from afserve.trace import KV_BLOCKS

_START_SECONDS = 0.001  # of a restoration, whatever its size
_WEIGHT = 0.3  # of the newest one in the measured rate
_AGAIN = 1.5  # a tier that was too slow is tried again: with each refusal it is thought faster by so much
_NAMES = {HOST: "host memory", DISK: "the disk"}
Places = Sequence[tuple[str, int]]  # how many blocks, from the first on, are in which tier


@dataclass(frozen=True, slots=True)
class _Restore(Job):
    source: KvSource | None  # who computes the rest


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
        self._restores = Jobs[_Restore](tiers.cancel)
        self._rates: dict[str, float] = {}  # bytes per second of the restorations so far, by tier
        self._time = TurnTime(clock.now())
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
        return (source.prefills and self._restore(request, source)) or self._moves.pull(request, source)

    def restore(self, request: GenerationRequest) -> bool:
        return self._restore(request, None)

    def _restore(self, request: GenerationRequest, source: KvSource | None) -> bool:
        names = self._node.usable_names(request)
        places = self._tiers.look(names)
        if not places or len(self._restores) >= self._most:
            return False
        blocks = self._worth(places)
        if self._computing(sum(count for _, count in places)) > 2 * _START_SECONDS:
            for tier in _behind(places, blocks):  # of fewer tokens no tier would be fast enough
                self._rates[tier] *= _AGAIN
        if not blocks:
            return False
        limit = limit_of(self._computing(blocks))
        number = self._tiers.restore(names, limit, blocks)
        if number is not None:
            self._restores.wait_for(_Restore(request, self._clock.now(), limit, source), number)
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
        self._restores.forget_request(number)

    def copy_to(self, peers: Iterable[SplitMember]) -> None:
        self._moves.copy_to(peers)

    def turn(self) -> list[GenerationRequest]:
        """What was pulled from another node may go on here: its beginning may be in a tier."""
        now, busy = self._clock.now(), self._node.busy
        seconds = self._time.seconds(now, busy=busy)
        moved = [request for request in self._moves.turn() if not self.restore(request)]
        if self._tiers.busy:
            self._tiers.turn(seconds)
        ended = list(self._tiers.ended)
        self._tiers.ended.clear()
        for restored in ended:
            jobs = self._restores.take_waiting(restored.job)
            if jobs:
                self._note(jobs[0].request, restored)
            # Others may go on where the first one's beginning ends, if anything came at all.
            again = any(restored.received.values())
            for number, job in enumerate(jobs):
                if not (number and again and self._restore(job.request, job.source)):
                    moved += self._go_on(job)
        return moved

    def _go_on(self, job: _Restore) -> list[GenerationRequest]:
        """The request, where it waits for nothing more."""
        if job.request.wants_row:
            self._moves.restored(job.request)
            return []
        waits = job.source is not None and self._moves.pull(job.request, job.source)
        return [] if waits else [job.request]

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
            rate = max(1, received) * self._block_bytes / restored.seconds
            self._rates[tier] = smoothed(self._rates.get(tier, 0.0), rate, _WEIGHT)

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
