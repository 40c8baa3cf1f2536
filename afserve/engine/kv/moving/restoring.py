"""Requests whose beginning is in a tier below this node's cache: read into it before they are scheduled.

So much of it is read as is predicted to come sooner than the tokens can be computed again, by rates measured here for
each tier, and for no longer than that would take. Where the cache is full of what others wait for or compute, they
stand in a line: what were read now would be gone before its turn. Who has room passes those who have none yet, and what
is computed ahead never stands there. It knows neither memory nor files, and no other nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from afserve.clock import Clock
from afserve.comm.kv.source import KvSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.kv.blocks import Hash
from afserve.engine.kv.moving.jobs import LEAST_SECONDS, Job, Jobs, limit_of
from afserve.engine.kv.tiers import DISK, HOST, KvTiers, Restored
from afserve.engine.scheduling.request import GenerationRequest
from afserve.engine.stats import TierStats, smoothed
from afserve.tracing.trace import KV_BLOCKS

_START_SECONDS = 0.001  # of a restoration, whatever its size
_WEIGHT = 0.3  # of the newest one in the measured rate
_AGAIN = 1.5  # a tier that was too slow is tried again: with each refusal it is thought faster by so much
IN_LINE = 30.0  # seconds, then it is computed
_LOOK = 0.01  # seconds between two looks at the line, where nothing has come meanwhile
_NAMES = {HOST: "host memory", DISK: "the disk"}
Places = Sequence[tuple[str, int]]  # how many blocks, from the first on, are in which tier


@dataclass(frozen=True, slots=True)
class Restore(Job):
    """Of the first blocks of `names`."""

    source: KvSource | None  # who computes the rest
    names: list[Hash]


class Restores:
    """Without `tiers` nothing is ever there. `tell` takes lines for the run's log, and `most` requests wait at once:
    more are the scheduler's to take or to refuse."""

    def __init__(
        self,
        tiers: KvTiers | None,
        node: AttentionNode[Any],
        clock: Clock,
        block_size: int,
        block_bytes: int,
        tell: Callable[[str], None],
        most: int,
    ) -> None:
        self._tiers, self._node, self._clock = tiers, node, clock
        self._block_size, self._block_bytes = block_size, block_bytes
        self._tell, self._most = tell, most
        self._jobs = Jobs[Restore](tiers.cancel if tiers is not None else lambda number: None)
        self._rates: dict[str, float] = {}  # bytes per second of the restorations so far, by tier
        self._looked = clock.now()  # at the line

    @property
    def busy(self) -> bool:
        return self._tiers is not None and (self._tiers.busy or bool(self._jobs.queue))

    @property
    def in_line(self) -> int:
        """Requests that wait for room in the cache."""
        return len(self._jobs.queue)

    def restore(self, request: GenerationRequest, source: KvSource | None = None) -> bool:
        """Whether the request waits for its beginning; `turn` returns it. Then `source` is to compute the rest."""
        if self._tiers is None:
            return False
        names = self._node.usable_names(request)
        places = self._tiers.look(names)
        if not places or len(self._jobs) >= self._most:
            return False
        blocks = self._worth(places)
        if self._computing(sum(count for _, count in places)) > 2 * _START_SECONDS:
            for tier in _behind(places, blocks):  # of fewer tokens no tier would be fast enough
                self._rates[tier] *= _AGAIN
        if not blocks:
            return False
        job = Restore(request, self._clock.now(), IN_LINE, source, names)
        if not self._tiers.has_room(names, blocks):
            if request.ahead:
                return False
            self._jobs.queue.append(job)
            return True
        return self._begin(self._tiers, job, blocks)

    def _begin(self, tiers: KvTiers, job: Restore, blocks: int) -> bool:
        """Whether so many are on their way."""
        number = tiers.restore(job.names, limit_of(self._computing(blocks)), blocks) if blocks else None
        if number is not None:
            self._jobs.wait_for(job, number)
        return number is not None

    def _move_line(self, tiers: KvTiers) -> list[Restore]:
        """Begin with those that have room now, the most urgent first; those that have waited too long, or for
        nothing."""
        over = self._jobs.take_late(self._clock.now())
        for job in sorted(self._jobs.queue, key=lambda job: job.request.priority):
            blocks = self._worth(tiers.look(job.names))
            if blocks and not tiers.has_room(job.names, blocks):
                continue
            if not self._begin(tiers, job, blocks):
                self._jobs.queue.remove(job)
                over.append(job)
        return over

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

    @property
    def exist(self) -> bool:
        """Whether there is anything below the cache."""
        return self._tiers is not None

    def bring(self, names: Sequence[Hash]) -> bool:
        """Whether some of this chain comes into the cache for another node, as far as it would be worth it here."""
        if self._tiers is None or not (blocks := self._worth(self._tiers.look(names))):
            return False
        limit = limit_of(self._computing(blocks))
        return self._tiers.restore(names, limit, blocks, awaited=False) is not None

    def brings(self, names: Sequence[Hash]) -> bool:
        """Whether the first block of this chain that is not in the cache is on its way to it."""
        known = self._node.known(names)
        return self._tiers is not None and known < len(names) and self._tiers.brings(names[known])

    def cancel(self, number: int) -> None:
        """May be said of any request."""
        self._jobs.forget_request(number)

    def turn(self, seconds: float) -> list[Restore]:
        """What waits no more, after a turn of the tiers that takes so long."""
        if self._tiers is None:
            return []
        self._tiers.on_look()
        if self._tiers.busy:
            self._tiers.turn(seconds)
        ended, over = list(self._tiers.ended), []
        self._tiers.ended.clear()
        for restored in ended:
            jobs = self._jobs.take_waiting(restored.job)
            self._measure(restored)
            if jobs:
                self._note(jobs[0].request, restored)
            # Others may go on where the first one's beginning ends, if anything came at all.
            again = any(restored.received.values())
            for number, job in enumerate(jobs):
                if not (number and again and self.restore(job.request, job.source)):
                    over.append(job)
        if self._jobs.queue and (ended or self._clock.now() - self._looked >= _LOOK):
            self._looked = self._clock.now()
            over += self._move_line(self._tiers)
        return over

    def _note(self, request: GenerationRequest, restored: Restored) -> None:
        received, asked = sum(restored.received.values()), sum(restored.asked.values())
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

    def stats(self) -> TierStats:
        return TierStats() if self._tiers is None else self._tiers.stats()

    def close(self) -> None:
        if self._tiers is not None:
            self._tiers.close()


def _behind(places: Places, blocks: int) -> set[str]:
    """The tiers of what comes after so many blocks."""
    found = set()
    for tier, count in places:
        if blocks <= 0:
            found.add(tier)
        blocks -= count
    return found
