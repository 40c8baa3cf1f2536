"""Nodes of `bench.agent_hour` that know more than any: what was computed once, anywhere, is found by whoever has room.
Either it always lies in a cache; or caches of the same size keep what is asked for soonest, which is known to them
(Belady, 1966), and the rest is read from a disk that has everything. So no way to evict or to keep is sooner.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from afserve.clock import FakeClock
from afserve.engine.kv.blocks import Hash
from afserve.engine.kv.tiers import DISK
from afserve.engine.scheduling.sequence import Sequence as Running
from bench.agent_hour_node import BLOCK, HourNode, Job, Machine, Tiered


@dataclass
class Everything:
    """Of all nodes and all their lives: blocks that were computed, and those of them in a cache that nobody holds, by
    when they are asked for again. `room` is of all caches together, None where nothing is ever evicted."""

    room: int | None = None
    ever: set[Hash] = field(default_factory=set)
    held: Counter[Hash] = field(default_factory=Counter)
    idle: dict[Hash, float] = field(default_factory=dict)
    _latest: list[tuple[float, Hash]] = field(default_factory=list)

    def found(self, names: Sequence[Hash]) -> list[Hash]:
        return list(itertools.takewhile(self.ever.__contains__, names))

    def below(self, names: Sequence[Hash]) -> int:
        """How many of these have to be read."""
        return (
            0 if self.room is None else sum(name not in self.held and name not in self.idle for name in names)
        )

    def leave(self, names: Sequence[Hash], until: float) -> None:
        for name in names:
            if self.room is not None and name not in self.held:
                self.idle[name] = min(until, self.idle.get(name, until))
                heapq.heappush(self._latest, (-self.idle[name], name))

    def fit(self, fresh: int) -> None:
        """Beside so many that have no name yet: what is asked for last goes."""
        while self.room is not None and self.idle and len(self.held) + len(self.idle) + fresh > self.room:
            until, name = heapq.heappop(self._latest)
            if self.idle.get(name) == -until:
                del self.idle[name]


class OracleNode(HourNode):
    """It has room for `blocks` of those that run, each once. What is read for a request takes none before it begins."""

    def __init__(self, blocks: int, machine: Machine, clock: FakeClock, all: Everything) -> None:
        super().__init__(2, Tiered(), machine, clock)
        self._room, self._all = blocks, all
        self._held = Counter[Hash]()
        self._fresh = 0  # blocks of those that run which had no name when they began
        self._mine: dict[
            int, tuple[list[Hash], int]
        ] = {}  # by request: those with a name, and how many others
        self._read: dict[int, float] = {}

    @property
    def cache_tokens(self) -> int:
        return self._room * BLOCK

    def read(self, job: Job) -> bool:
        missing = self._all.below(self._all.found(self.usable_names(job.request)))
        if missing:
            self.reads_until = max(self._clock.now(), self.reads_until) + self._machine.reading(DISK, missing)
            self._read[job.request.handle] = self.reads_until
        return missing > 0

    def take_read(self) -> dict[int, float]:
        over, self._read = self._read, {}
        return over

    def pull_beginning(self, job: Job, other: HourNode) -> float:
        return self._clock.now()

    def lacking(self, sequence: Running) -> int:
        return len(sequence.tokens) - BLOCK * len(self._all.found(self.usable_names(sequence.request)))

    def begin(self, job: Job) -> bool:
        names = self._all.found(self.usable_names(job.request))
        fresh = -(-(len(job.request.prompt_ids) + len(job.output)) // BLOCK) - len(names)
        if len(self._held) + self._fresh + fresh + sum(name not in self._held for name in names) > self._room:
            return False
        self._held.update(names)
        self._all.held.update(names)
        for name in names:
            self._all.idle.pop(name, None)
        self._mine[job.request.handle] = names, fresh
        self._fresh += fresh
        self._all.fit(self._fresh)
        job.sequence = Running.start(job.request, 0, frozenset())
        job.sequence.computed = job.found = BLOCK * len(names)
        return True

    def compute(self, job: Job, tokens: int) -> None:
        assert job.sequence is not None
        job.sequence.computed += tokens
        self._all.ever.update(job.sequence.full_hashes(BLOCK)[: job.sequence.computed // BLOCK])

    def end(self, job: Job) -> None:
        names, fresh = self._mine.pop(job.request.handle)
        self._let_go(names, fresh)
        job.sequence = None

    def _let_go(self, names: list[Hash], fresh: int) -> None:
        self._fresh -= fresh
        for held in (self._held, self._all.held):
            held.subtract(names)
            for name in names:
                if not held[name]:
                    del held[name]

    def comes_again(self, names: Sequence[Hash], until: float) -> None:
        self._all.leave(names, until)
        self._all.fit(self._fresh)

    def close(self) -> None:
        """What lies in its cache is lost, in part: the others' is not told from it."""
        for names, fresh in self._mine.values():
            self._let_go(names, fresh)
