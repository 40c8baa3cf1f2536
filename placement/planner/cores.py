"""The ping-pong of several node processes on a few cores: stage times in, seconds per step out, event by event.

A process that has work waits in line for a core and keeps it until it has nothing to do; nobody is interrupted (stages
are far shorter than a scheduler's time slice, and a node that waits for rows gives its core away). The expert nodes'
soft barrier is the engine's own. Micro-batches begin when their prompts are read, not all at once, so the mean over
several such beginnings is taken: in step with each other all would merge. With a core for everybody this is the closed
form of `afserve/placement/pipeline.py`. No I/O.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

from afserve.soft_barrier import SoftBarrier


@dataclass(frozen=True, slots=True)
class CoreStages:
    """Seconds. `experts[n - 1]`: one call of the expert node that got most rows of this layer, for n messages together;
    `others`: of each other one, where that differs. `gateway`: per step of one micro-batch. `dispatch` and `combine`
    pass without anybody's core. `attention_beside` and `experts_beside`: how many times as long a stage takes that
    begins while another core is busy."""

    attention: float
    outside: float
    experts: Sequence[float]
    dispatch: float
    combine: float
    gateway: float = 0.0
    attention_beside: float = 1.0
    experts_beside: float = 1.0
    others: Sequence[float] = ()


Stream = tuple[int, int]  # attention node, micro-batch
Job = tuple[float, Callable[[], None]]  # seconds, and what happens at the end


class CoreUser(Protocol):
    def next(self, now: float) -> Job | None: ...


class Cores:
    """Time, the cores, and the processes in line for them."""

    def __init__(self, cores: int) -> None:
        self.now = 0.0
        self._free = self._cores = cores
        self._line: deque[CoreUser] = deque()
        self._active: set[int] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), event))

    @property
    def crowded(self) -> bool:
        """Whether another core than that of the node which asks is busy."""
        return self._free < self._cores - 1

    def wake(self, node: CoreUser) -> None:
        """It has work; nothing changes for one that runs or is in line."""
        if id(node) not in self._active:
            self._active.add(id(node))
            self._line.append(node)

    def turn(self) -> None:
        """Give free cores away, then go to the next event."""
        while self._free and self._line:
            self._free -= 1
            self._go_on(self._line.popleft())
        self.now, _, event = heapq.heappop(self._events)
        event()

    def _go_on(self, node: CoreUser) -> None:
        job = node.next(self.now)
        if job is None:
            self._active.discard(id(node))
            self._free += 1
            return
        seconds, done = job

        def end() -> None:
            done()
            self._go_on(node)

        self.at(self.now + seconds, end)


class Attention:
    """Runs what is due of its micro-batches, first come, first served."""

    def __init__(self, run: "Run", index: int) -> None:
        self._run, self._index = run, index
        self.due: deque[tuple[int, int]] = deque()  # micro-batch, layer; layer L is the end of a step

    def next(self, now: float) -> Job | None:
        if not self.due:
            return None
        micro_batch, layer = self.due.popleft()
        run, stream = self._run, (self._index, micro_batch)
        longer = run.stages.attention_beside if run.cores.crowded else 1.0
        if layer == run.layers:
            return longer * run.stages.outside, lambda: run.stepped(stream)
        return longer * run.stages.attention, lambda: run.dispatched(stream, layer)


class Experts:
    """Merges what is there of one layer, and holds it as long as the soft barrier says."""

    def __init__(self, run: "Run", index: int) -> None:
        self._run, self._index = run, index
        self._barrier = SoftBarrier(run.layers)
        self._held: dict[int, list[Stream]] = {}  # by layer, the longest waiting first
        self._since: dict[int, float] = {}

    def arrive(self, stream: Stream, layer: int, now: float) -> None:
        self._barrier.arrived(stream, stream[0], layer, now)
        self._held.setdefault(layer, []).append(stream)
        self._since.setdefault(layer, now)

    def next(self, now: float) -> Job | None:
        for layer, streams in self._held.items():
            due = self._barrier.call_time(layer, {node for node, _ in streams}, self._since[layer], now)
            if due > now:
                self._run.cores.at(due, lambda: self._run.cores.wake(self))
                continue
            return self._compute(layer)
        return None

    def _compute(self, layer: int) -> Job:
        del self._since[layer]
        streams = self._held.pop(layer)
        stages = self._run.stages
        calls = stages.experts if self._run.fullest(layer) == self._index else stages.others or stages.experts
        seconds = calls[len(streams) - 1] * (stages.experts_beside if self._run.cores.crowded else 1.0)
        return seconds, lambda: self._answer(layer, streams, seconds)

    def _answer(self, layer: int, streams: list[Stream], seconds: float) -> None:
        run = self._run
        self._barrier.note_call(streams, run.cores.now, seconds)
        for stream in streams:
            run.cores.at(run.cores.now + run.stages.combine, partial(run.combined, stream, layer))


class CoresGateway:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.steps = 0

    def next(self, now: float) -> Job | None:
        if not self.steps:
            return None
        self.steps -= 1
        return self._seconds, lambda: None


class Run:
    """`begins`: when each micro-batch of each attention node does, in seconds."""

    def __init__(
        self,
        stages: CoreStages,
        cores: int,
        ranks: int,
        expert_nodes: int,
        begins: Sequence[float],
        layers: int,
    ) -> None:
        self.stages, self.layers, self.cores = stages, layers, Cores(cores)
        self._attention = [Attention(self, index) for index in range(ranks)]
        self._experts = [Experts(self, index) for index in range(expert_nodes)]
        self._gateway = CoresGateway(stages.gateway)
        self._missing: dict[Stream, int] = {}
        self.ends: dict[Stream, list[float]] = {}
        streams = itertools.product(range(ranks), range(len(begins) // ranks))
        for stream, begin in zip(streams, begins, strict=True):
            self.ends[stream] = []
            self.cores.at(begin, partial(self._enqueue, stream, 0))

    def fullest(self, layer: int) -> int:
        """The expert node that most rows of `layer` go to: by chance, so each in turn."""
        return layer % len(self._experts)

    def _enqueue(self, stream: Stream, layer: int) -> None:
        node = self._attention[stream[0]]
        node.due.append((stream[1], layer))
        self.cores.wake(node)

    def dispatched(self, stream: Stream, layer: int) -> None:
        self._missing[stream] = len(self._experts)
        for node in self._experts:
            self.cores.at(self.cores.now + self.stages.dispatch, partial(self._arrive, node, stream, layer))

    def _arrive(self, node: Experts, stream: Stream, layer: int) -> None:
        node.arrive(stream, layer, self.cores.now)
        self.cores.wake(node)

    def combined(self, stream: Stream, layer: int) -> None:
        self._missing[stream] -= 1
        if not self._missing[stream]:
            self._enqueue(stream, layer + 1)

    def stepped(self, stream: Stream) -> None:
        self.ends[stream].append(self.cores.now)
        if self.stages.gateway:
            self._gateway.steps += 1
            self.cores.wake(self._gateway)
        self._enqueue(stream, 0)


def step_seconds(
    stages: CoreStages,
    *,
    cores: int,
    ranks: int,
    expert_nodes: int,
    micro_batches: int,
    layers: int,
    steps: int = 24,
    starts: int = 8,
) -> float:
    """Seconds from a token to the same request's next: the mean over micro-batches, after a third of the steps, and
    over so many beginnings, each at any point of a step."""
    random, span = Random(0), layers * (stages.attention + stages.experts[0]) + stages.outside
    played = []
    for _ in range(starts):
        begins = [span * random.random() for _ in range(ranks * micro_batches)]
        played.append(_played(Run(stages, cores, ranks, expert_nodes, begins, layers), steps))
    return sum(played) / starts


def _played(run: Run, steps: int) -> float:
    while min(map(len, run.ends.values())) < steps:
        run.cores.turn()
    skipped = steps // 3
    each = [(ends[-1] - ends[skipped]) / (len(ends) - 1 - skipped) for ends in run.ends.values()]
    return sum(each) / len(each)
