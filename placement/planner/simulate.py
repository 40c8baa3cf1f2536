"""A discrete-event simulation of one deployment: ranks, micro-batches and layers play the ping-pong.

Lengths are random, routing is skewed, there are stragglers, and requests come and go. Each station serves in the order
of arrival. Stations are each attention rank, each direction of its link, and the expert side, which holds a layer's
rows for the other ranks up to a deadline and answers when its slowest device is done. Stage times come from the
functions that the plan uses. It knows no files and no terminal.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.simulate_stages import StageTable

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Script:
    """What to play. `steps`: decode steps per micro-batch, after `warm` that are not counted. Straggling: each
    station's time is multiplied by 1 + an exponential of mean `jitter`; with chance `stall_chance` it takes
    `stall_factor` times as long. patience: how long the experts hold a layer's first rows for those of the other ranks
    (the soft barrier), in full expert stages; under 2, a straggler's own pass over the weights delays the next layers
    in turn, and saturated experts collapse. `trace_steps`: steps of rank 0 kept as a timeline."""

    ranks: int
    micro_batches: int
    layers: int
    steps: int = 24
    warm: int = 6
    jitter: float = 0.0
    stall_chance: float = 0.0
    stall_factor: float = 5.0
    patience: float = 4.0
    seed: int = 0
    trace_steps: int = 2


@dataclass(frozen=True, slots=True)
class Span:
    """One box of the timeline: station name, micro-batch, layer, start and end in seconds."""

    station: str
    micro_batch: int
    layer: int
    start: float
    end: float


@dataclass(slots=True)
class Played:
    """Step times in seconds of every micro-batch, busy shares per kind of station, and the timeline."""

    step_seconds: list[float] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True)
class _Station:
    free: float = 0.0
    work: float = 0.0

    def serve(self, ready: float, seconds: float) -> float:
        """Start when free, return when done."""
        self.free = max(self.free, ready) + seconds
        self.work += seconds
        return self.free


class Simulation:
    """One run. `play()` yields the share done now and then, for a progress display, and fills `result`."""

    def __init__(self, script: Script, stages: StageTable) -> None:
        self.script = script
        self.stages = stages
        self.result = Played()
        self._random = np.random.default_rng(script.seed)
        self._attention = [_Station() for _ in range(script.ranks)]
        self._out = [_Station() for _ in range(script.ranks)]
        self._back = [_Station() for _ in range(script.ranks)]
        self._experts = _Station()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._begun: dict[tuple[int, int], float] = {}
        self._done = 0
        self._groups: dict[tuple[int, int], list[tuple[float, int, int]]] = {}
        self._patience = script.patience * stages.full_expert_seconds

    def play(self) -> Iterator[float]:
        """Run to the end."""
        script = self.script
        for rank in range(script.ranks):
            for batch in range(script.micro_batches):
                self._at(0.0, self._starter(rank, batch, 0))
        total = script.ranks * script.micro_batches * (script.steps + script.warm)
        told = 0
        while self._events:
            now, _, act = heapq.heappop(self._events)
            act(now)
            if self._done * 50 // total > told:
                told = self._done * 50 // total
                yield self._done / total
        self._finish()

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, act))

    def _starter(self, rank: int, batch: int, step: int) -> Callable[[float], None]:
        def start(now: float) -> None:
            if step == self.script.warm and (rank, batch) not in self._begun:
                self._begun[rank, batch] = now
            self.stages.new_step(rank, batch, self._random)
            self._attend(now, rank, batch, step, 0)

        return start

    def _attend(self, now: float, rank: int, batch: int, step: int, layer: int) -> None:
        seconds = self.stages.attention(rank, batch) + (self.stages.outside(rank) if layer == 0 else 0.0)
        seconds *= self._slow()
        done = self._attention[rank].serve(now, seconds)
        self._span(f"attention {rank}", batch, step, layer, done - seconds, done)
        self._at(done, lambda at: self._send(at, rank, batch, step, layer))

    def _send(self, now: float, rank: int, batch: int, step: int, layer: int) -> None:
        busy, latency = self.stages.dispatch()
        done = self._out[rank].serve(now, busy)
        self._span(f"dispatch {rank}", batch, step, layer, done - busy, done)
        self._at(done + latency, lambda at: self._arrive(at, rank, batch, step, layer))

    def _arrive(self, now: float, rank: int, batch: int, step: int, layer: int) -> None:
        group = self._groups.setdefault((batch, layer), [])
        group.append((now, rank, step))
        if len(group) == 1:
            self._at(now + self._patience, self._compute)
        if len(group) == self.script.ranks:
            self._at(now, self._compute)

    def _compute(self, now: float) -> None:
        """Serve the oldest group that is whole or has waited long enough; come back when free."""
        if self._experts.free > now:
            return
        ready = [
            (group[0][0], key)
            for key, group in self._groups.items()
            if len(group) == self.script.ranks or group[0][0] + self._patience <= now + 1e-12
        ]
        if not ready:
            return
        batch, layer = min(ready)[1]
        group = self._groups.pop((batch, layer))
        seconds = self.stages.experts(len(group), self._random) * self._slow()
        done = self._experts.serve(now, seconds)
        self._span("experts", batch, group[0][2], layer, done - seconds, done, group[0][1])
        for _, rank, step in group:
            self._at(done, self._returner(rank, batch, step, layer))
        self._at(done, self._compute)

    def _returner(self, rank: int, batch: int, step: int, layer: int) -> Callable[[float], None]:
        def send_back(now: float) -> None:
            busy, latency = self.stages.combine()
            done = self._back[rank].serve(now, busy)
            self._span(f"combine {rank}", batch, step, layer, done - busy, done)
            self._at(done + latency, lambda at: self._next(at, rank, batch, step, layer))

        return send_back

    def _next(self, now: float, rank: int, batch: int, step: int, layer: int) -> None:
        if layer + 1 < self.script.layers:
            self._attend(now, rank, batch, step, layer + 1)
            return
        self._done += 1
        if step + 1 < self.script.steps + self.script.warm:
            self._starter(rank, batch, step + 1)(now)
        else:
            self.result.step_seconds.append((now - self._begun[rank, batch]) / self.script.steps)
        self.result.seconds = now

    def _slow(self) -> float:
        script = self.script
        factor = 1.0 + (self._random.exponential(script.jitter) if script.jitter else 0.0)
        if script.stall_chance and self._random.random() < script.stall_chance:
            factor *= script.stall_factor
        return factor

    def _span(
        self, station: str, batch: int, step: int, layer: int, start: float, end: float, rank: int = 0
    ) -> None:
        first = self.script.warm
        if first <= step < first + self.script.trace_steps and (station.endswith(" 0") or rank == 0):
            self.result.spans.append(Span(station, batch, layer, start, end))

    def _finish(self) -> None:
        kinds = {
            "attention": self._attention,
            "dispatch": self._out,
            "combine": self._back,
            "experts": [self._experts],
        }
        for name, stations in kinds.items():
            self.result.busy[name] = float(np.mean([s.work for s in stations])) / self.result.seconds
