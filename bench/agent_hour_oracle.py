"""A node of `bench.agent_hour` whose cache loses nothing: what was computed once, anywhere, is found at once by whoever
has room for it. No way to evict, to keep or to bring back finds more, and none is sooner."""

from collections.abc import Iterable

from afserve.clock import FakeClock
from afserve.engine.kv.blocks import Hash
from afserve.engine.scheduling.sequence import Sequence as Running
from bench.agent_hour_node import BLOCK, HourNode, Job, Machine, Tiered


class OracleNode(HourNode):
    """`ever` are the blocks that were computed so far, of all nodes and all their lives. It has room for `blocks` of
    those that run, each once."""

    def __init__(self, blocks: int, machine: Machine, clock: FakeClock, ever: set[Hash]) -> None:
        super().__init__(2, Tiered(), machine, clock)
        self._room, self._ever = blocks, ever
        self._held: dict[Hash, int] = {}  # by how many
        self._fresh = 0  # blocks of those that run which have no name at the beginning
        self._mine: dict[
            int, tuple[list[Hash], int]
        ] = {}  # by request: those with a name, and how many others

    def read(self, job: Job) -> bool:
        return False

    def pull_beginning(self, job: Job, other: HourNode) -> float:
        return self._clock.now()

    def _found(self, names: Iterable[Hash]) -> list[Hash]:
        found = []
        for name in names:
            if name not in self._ever:
                break
            found.append(name)
        return found

    def lacking(self, sequence: Running) -> int:
        return len(sequence.tokens) - BLOCK * len(self._found(self.usable_names(sequence.request)))

    def begin(self, job: Job) -> bool:
        names = self._found(self.usable_names(job.request))
        whole = -(-(len(job.request.prompt_ids) + len(job.output)) // BLOCK)
        new = sum(name not in self._held for name in names) + whole - len(names)
        if self.used + new > self._room:
            return False
        for name in names:
            self._held[name] = self._held.get(name, 0) + 1
        self._mine[job.request.handle] = names, whole - len(names)
        self._fresh += whole - len(names)
        job.sequence = Running.start(job.request, 0, frozenset())
        job.sequence.computed = job.found = BLOCK * len(names)
        return True

    @property
    def used(self) -> int:
        return len(self._held) + self._fresh

    def compute(self, job: Job, tokens: int) -> None:
        assert job.sequence is not None
        job.sequence.computed += tokens
        self._ever.update(job.sequence.full_hashes(BLOCK)[: job.sequence.computed // BLOCK])

    def end(self, job: Job) -> None:
        names, fresh = self._mine.pop(job.request.handle)
        self._fresh -= fresh
        for name in names:
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]
        job.sequence = None
