"""What three pools of equal devices make of a demand, by the planner's stage times: the pilot's model in a replay.

Devices that read and devices that decode share the experts (`phase_stages.Apart`). Means in, means out; requests one by
one are played by the planner's `simulate/phases`, and second by second by `flow`.
"""

import math
from dataclasses import dataclass, field

from afserve.config import MAX_MICRO_BATCHES
from afserve.control.pilot.observed import SeenWindow
from afserve.control.pilot.queue import QueueWait
from afserve.control.pilot.sizes import Demand, Expected, PoolSizes, TargetTimes
from afserve.placement.planner.simulate.phase_stages import IDLE, Apart, Pieces
from afserve.placement.planner.simulate.phase_tables import StageTables, StepTimes, Work

_ROUNDS = 4  # in which running requests, their step and the readers are fitted to each other
_DECODE_MICRO_BATCHES = 1  # with two, how long prompts wait for the experts jumps where one becomes as good
_CLOSE = 0.01  # share of a value: nearer ones are as good as equal
_TAIL = 7.5  # tokens of a prompt that fill no block of 16, on average
_LOST = Expected(math.inf, math.inf, 1.0, (math.inf, math.inf, math.inf), fits=False)


class StepPace:
    """Seconds of both kinds of step at some moment. `slower`: how much longer all of it takes than the tables say."""

    def __init__(self, stages: "TabledStages", sizes: PoolSizes, slower: float = 1.0) -> None:
        self._reads, self._decodes = stages.pools(sizes)
        self._stages, self._sizes, self._slower = stages, sizes, slower
        self._read = IDLE
        self.step = self.read_rate = 0.0

    def fit(self, running: float, context: float, reading: float, prompt: float, answer: float) -> StepTimes:
        """`running` requests decode with `context` tokens each, and `reading` ranks read prompts of such a length:
        afterwards `step` is the seconds of a decode step, and `read_rate` the tokens per second of one reader. Of each
        request that begins in a step, half a block of its prompt is computed there too."""
        stages, sizes = self._stages, self._sizes
        reading = min(reading, sizes.prefill)
        chunk = min(float(stages.chunk), max(prompt, 1.0))
        rows = running * (1 + _TAIL / answer)
        decoding = Work(math.ceil(rows / sizes.decode), rows, context)
        busy = self._read if reading else IDLE
        step = self._decodes.step(decoding, busy, stages.pieces) if running else IDLE
        every = chunk * max(1.0, reading)
        read = self._reads.step(
            Work(tokens=chunk, pairs=chunk * prompt / 2, all_tokens=every), step, stages.pieces
        )
        self._read = read._replace(
            experts=min(1.0, read.experts * reading), links=min(1.0, read.links * reading)
        )
        self.step = step.seconds * self._slower
        self.read_rate = chunk / (read.seconds * self._slower)
        return step


@dataclass(frozen=True)
class TabledStages:
    """The planner's stage times of one kind of device, and how its prompts are cut."""

    tables: StageTables
    pieces: Pieces
    chunk: int = 2048
    _pools: dict[tuple[int, int, bool, int], Apart] = field(default_factory=dict)

    def pools(self, sizes: PoolSizes) -> tuple[Apart, Apart]:
        """Those that read, and those that decode; the same objects for the same sizes, which keep what they know."""
        near = sizes.total <= self.tables.chip.fast_domain
        return (
            self._pool(sizes.prefill, sizes.experts, near, MAX_MICRO_BATCHES),
            self._pool(sizes.decode, sizes.experts, near, _DECODE_MICRO_BATCHES),
        )

    def _pool(self, ranks: int, experts: int, near: bool, micro_batches: int) -> Apart:
        key = ranks, experts, near, micro_batches
        if key not in self._pools:
            self._pools[key] = Apart(self.tables, ranks, experts, micro_batches, near)
        return self._pools[key]

    @property
    def yielded(self) -> float:
        """Tokens of a request in a step."""
        return self.tables.setting.tokens_per_step

    def room(self, sizes: PoolSizes) -> float:
        """Tokens of caches that fit where it is decoded; 0 where the experts do not fit."""
        return self.pools(sizes)[1].kv_tokens

    def least(self) -> PoolSizes:
        """One device of each kind, and as many as hold the experts. Raises ValueError where 4,096 do not."""
        for experts in range(1, 4097):
            if self.tables.hold_experts(experts):
                return PoolSizes(1, 1, experts)
        raise ValueError("the experts do not fit on 4,096 devices")


class TabledModel:
    def __init__(self, stages: TabledStages) -> None:
        self.stages = stages
        self.ready = True
        self._guess = 0.02  # seconds of a token: what was found last is near what is asked next

    def learn_rates(self, window: SeenWindow) -> bool:
        """Tables stay as they are; a policy corrects them."""
        return False

    def expect(self, sizes: PoolSizes, demand: Demand, wanted: TargetTimes) -> Expected:
        stages = self.stages
        if min(sizes) < 1:
            return _LOST
        room, pace = stages.room(sizes), StepPace(stages, sizes)
        tpot, reading = self._guess, 0.0
        for _ in range(_ROUNDS):
            running = demand.rate * demand.answer * tpot
            if running * demand.context > 2 * room or reading > 2 * sizes.prefill:
                return _LOST
            step = pace.fit(running, demand.context, reading, demand.computed, demand.answer)
            before, tpot = tpot, pace.step / stages.yielded
            read, reading = reading, demand.rate * demand.computed / pace.read_rate
            if abs(tpot - before) < _CLOSE * tpot and abs(reading - read) < _CLOSE * reading:
                break
        self._guess = tpot
        return self._expected(sizes, demand, wanted, pace, step)

    def _expected(
        self, sizes: PoolSizes, demand: Demand, wanted: TargetTimes, pace: StepPace, step: StepTimes
    ) -> Expected:
        stages, room = self.stages, self.stages.room(sizes)
        tpot, share = (
            pace.step / stages.yielded,
            demand.rate * demand.computed / pace.read_rate / sizes.prefill,
        )
        service = demand.computed / pace.read_rate
        wait = QueueWait(service, sizes.prefill, share, demand.variation)
        after = stages.tables.hand_over(demand.prompt) + 1.5 * pace.step
        kept = demand.rate * demand.answer * tpot * (demand.prompt + demand.answer)
        return Expected(
            wait.mean + service + after,
            tpot,
            wait.late(wanted, after + demand.longest / pace.read_rate),
            (share, kept / room if room else math.inf, min(1.0, step.experts)),
            fits=kept < room,
        )
