"""A discrete-event simulation of one deployment: ranks, micro-batches and layers play the ping-pong.

Lengths are random, routing is skewed, there are stragglers. Each station serves in the order of arrival. Stations are
each attention rank, each direction of its link, each direction of the experts' links, which all ranks share, and the
expert side, which holds a layer's rows for the other ranks up to a deadline and answers when its slowest device is
done. Whatever follows an expert pass on one rank is in the order of the passes, so one event is one pass, and its ranks
go on together, as arrays. Stage times come from the functions that the plan uses. It knows no files and no terminal.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.simulate.layer_stages import LinkTimes, StageTable

Array = NDArray[np.float64]
Ranks = NDArray[np.int64]


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
class StationSpan:
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
    spans: list[StationSpan] = field(default_factory=list)
    seconds: float = 0.0


class Simulation:
    """One run. `play()` yields the share done now and then, for a progress display, and fills `result`."""

    def __init__(self, script: Script, stages: StageTable) -> None:
        self.script = script
        self.stages = stages
        self.result = Played()
        self._random = np.random.default_rng(script.seed)
        ranks, batches = script.ranks, script.micro_batches
        self._free = {name: np.zeros(ranks) for name in ("attention", "dispatch", "combine")}
        self._shared = {"dispatch": 0.0, "combine": 0.0}
        self._work = dict.fromkeys((*self._free, "experts"), 0.0)
        self._experts_free = 0.0
        self._step = np.zeros((ranks, batches), dtype=np.int64)
        self._begun = np.zeros((ranks, batches))
        self._waiting: dict[tuple[int, int], tuple[Array, Ranks]] = {}
        self._patience = script.patience * stages.full_expert_seconds

    def play(self) -> Iterator[float]:
        """Run to the end."""
        script = self.script
        every = np.arange(script.ranks)
        for batch in range(script.micro_batches):
            self._attend(np.zeros(script.ranks), every, batch, 0)
        total = script.ranks * script.micro_batches * (script.steps + script.warm)
        told = 0
        while self._waiting:
            self._compute()
            done = int(self._step.sum())
            if done * 50 // total > told:
                told = done * 50 // total
                yield done / total
        self._finish()

    def _attend(self, ready: Array, ranks: Ranks, batch: int, layer: int) -> None:
        """Attention of these ranks from `ready` on, and their rows on the way to the experts."""
        outside = 0.0
        if layer == 0:
            first = self._step[ranks, batch] == self.script.warm
            self._begun[ranks[first], batch] = ready[first]
            self.stages.new_step(ranks, batch, self._random)
            outside = self.stages.outside
        seconds = self.stages.attention(ranks, batch) + outside
        attended = self._serve("attention", ranks, batch, layer, ready, seconds * self._slow(len(ranks)))
        arrived = self._transfer("dispatch", self.stages.dispatch, attended, ranks, batch, layer)
        times, waiting = self._waiting.get((batch, layer), (np.empty(0), np.empty(0, dtype=np.int64)))
        order = np.argsort(arrived, kind="stable")
        self._waiting[batch, layer] = (
            np.concatenate([times, arrived[order]]),
            np.concatenate([waiting, ranks[order]]),
        )

    def _compute(self) -> None:
        """One pass over the experts: the oldest group that is whole or has waited long enough, once they are free."""
        ready = {key: self._ready(times) for key, (times, _) in self._waiting.items()}
        now = max(min(ready.values()), self._experts_free)
        batch, layer = min(
            (key for key, when in ready.items() if when <= now),
            key=lambda key: (float(self._waiting[key][0].min()), key),
        )
        times, ranks = self._waiting.pop((batch, layer))
        here = times <= now + 1e-12
        if not here.all():
            self._waiting[batch, layer] = times[~here], ranks[~here]
        ranks = np.sort(ranks[here])
        seconds = self.stages.experts(len(ranks), self._random) * float(self._slow(1)[0])
        self._experts_free = now + seconds
        self._work["experts"] += seconds
        self._span("experts", ranks, batch, layer, now, self._experts_free)
        self._return(ranks, batch, layer)

    def _ready(self, times: Array) -> float:
        """When a group is whole, or its first rows have waited long enough."""
        waited = float(times.min()) + self._patience
        return min(float(times.max()), waited) if len(times) == self.script.ranks else waited

    def _return(self, ranks: Ranks, batch: int, layer: int) -> None:
        """Answers go back and share the experts' links evenly; then comes the next layer, or the next step."""
        done = np.full(len(ranks), self._experts_free)
        back = self._transfer("combine", self.stages.combine, done, ranks, batch, layer)
        back[:] = back.max()
        if layer + 1 < self.script.layers:
            self._attend(back, ranks, batch, layer + 1)
            return
        self._step[ranks, batch] += 1
        over = self._step[ranks, batch] == self.script.steps + self.script.warm
        taken = (back[over] - self._begun[ranks[over], batch]) / self.script.steps
        self.result.step_seconds.extend(taken.tolist())
        self.result.seconds = max(self.result.seconds, float(back.max()))
        if not over.all():
            self._attend(back[~over], ranks[~over], batch, 0)

    def _transfer(
        self, name: str, link: LinkTimes, ready: Array, ranks: Ranks, batch: int, layer: int
    ) -> Array:
        """When each rank's rows are across: both its own link and the experts', which takes one after the other, must
        have let them through. They flow through both at the same time."""
        own = self._serve(name, ranks, batch, layer, ready, np.full(len(ranks), link.own))
        begun = own - link.own
        order = np.argsort(begun, kind="stable")
        turns = np.arange(len(ranks))
        waited = np.maximum.accumulate(np.maximum(begun[order], self._shared[name]) - link.shared * turns)
        through = np.empty_like(own)
        through[order] = waited + link.shared * (turns + 1)
        self._shared[name] = float(through[order[-1]])
        return np.asarray(np.maximum(own, through) + link.latency)

    def _serve(self, name: str, ranks: Ranks, batch: int, layer: int, ready: Array, seconds: Array) -> Array:
        """Each rank's own station starts when free; when it is done."""
        free = self._free[name]
        done = np.maximum(free[ranks], ready) + seconds
        free[ranks] = done
        self._work[name] += float(seconds.sum())
        if ranks[0] == 0:
            self._span(f"{name} 0", ranks, batch, layer, float(done[0] - seconds[0]), float(done[0]))
        return np.asarray(done)

    def _slow(self, count: int) -> Array:
        script = self.script
        factor = np.ones(count)
        if script.jitter:
            factor += self._random.exponential(script.jitter, count)
        if script.stall_chance:
            factor[self._random.random(count) < script.stall_chance] *= script.stall_factor
        return factor

    def _span(self, station: str, ranks: Ranks, batch: int, layer: int, start: float, end: float) -> None:
        """Boxes of rank 0, and of the passes that have its rows."""
        first, step = self.script.warm, int(self._step[0, batch])
        if ranks[0] == 0 and first <= step < first + self.script.trace_steps:
            self.result.spans.append(StationSpan(station, batch, layer, start, end))

    def _finish(self) -> None:
        for name, work in self._work.items():
            stations = 1 if name == "experts" else self.script.ranks
            self.result.busy[name] = work / stations / self.result.seconds


def perfetto_json(spans: Sequence[StationSpan]) -> str:
    """A timeline as Chrome trace events, which https://ui.perfetto.dev opens: one track per station, one slice per
    micro-batch and layer, in microseconds from the first slice."""
    stations = sorted({span.station for span in spans})
    origin = min((span.start for span in spans), default=0.0)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": place, "args": {"name": station}}
        for place, station in enumerate(stations)
    ]
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": f"m{span.micro_batch} layer {span.layer}",
                "cat": span.station.split()[0],
                "pid": 1,
                "tid": stations.index(span.station),
                "ts": round((span.start - origin) * 1e6, 3),
                "dur": round((span.end - span.start) * 1e6, 3),
                "args": {"micro_batch": span.micro_batch, "layer": span.layer},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})
