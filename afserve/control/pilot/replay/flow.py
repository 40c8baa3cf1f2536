"""Requests on three pools that change size, second by second: days of hundreds of devices in seconds of computing.

Requests travel in packets: `weight` requests of one length that come together. Readers take prompts by the priority of
their class and then in order of arrival, as fast as all of them are, but none sooner than one reader can; a request
then waits for room where it is decoded, likewise, and gets tokens at the pace of the steps of that second
(`tabled.StepPace`). `tests/control/pilot` compares it with the planner's event-by-event simulator. It decides nothing
about sizes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from afserve.control.pilot.classes import ClassAim
from afserve.control.pilot.replay.counts import Packet, PacketCounts
from afserve.control.pilot.replay.tabled import StepPace, TabledStages
from afserve.control.pilot.sizes import PoolSizes, TargetTimes

_NEWEST = 0.02  # weight of a packet in the mean lengths
_SHORT_STEP = 1e-4  # seconds of a step at least


@dataclass
class FlowRun:
    """`advance` plays on to a moment; `resize` is for in between. `slower`: than the tables say."""

    stages: TabledStages
    packets: Sequence[Packet]
    wanted: TargetTimes
    sizes: PoolSizes
    slower: float = 1.0
    tick: float = 1.0
    classes: Sequence[ClassAim] = (ClassAim(""),)
    now: float = 0.0
    counts: PacketCounts = field(init=False)
    running: float = 0.0
    queued: float = 0.0  # prompt tokens that are not read

    def __post_init__(self) -> None:
        self._next = 0
        self.counts = PacketCounts(self.wanted, self.classes)
        turns = sorted({one.priority for one in self.classes})
        self._turn = [turns.index(one.priority) for one in self.classes]  # of each kind
        self._queues: list[deque[list[float]]] = [deque() for _ in turns]  # [tokens left, number]
        self._handed: list[tuple[float, int]] = []  # (when its KV is there, number)
        self._waiting: list[tuple[int, float, int]] = []  # for room: (turn, when its KV is there, number)
        self._ends: list[tuple[float, int, float]] = []  # (common count at its end, number, first token)
        self._progress = self._context = self._kept = self._reading = 0.0
        self._prompt = self._answer = 1.0
        self._pause = 0.0  # share of a second in which requests that move get no token
        self.resize(self.sizes)

    def resize(self, sizes: PoolSizes) -> None:
        """From now on. Requests on decode devices that go move, and wait until their KV is elsewhere."""
        gone = max(0, self.sizes.decode - sizes.decode)
        if gone and self.running:
            moved = self.stages.tables.hand_over(self._context / self.running)
            self._pause += gone / self.sizes.decode * moved
        self.sizes = sizes
        self._pace = StepPace(self.stages, sizes, self.slower)
        self._room = self.stages.room(sizes)

    @property
    def over(self) -> bool:
        return self._next == len(self.packets) and not (
            any(self._queues) or self._handed or self._waiting or self._ends
        )

    @property
    def step(self) -> float:
        """Seconds of the step that runs."""
        return self._pace.step

    def advance(self, until: float) -> None:
        while self.now < until - 1e-9:
            end = min(self.now + self.tick, until)
            self._play(end)
            self.now = end

    def _play(self, end: float) -> None:
        context = self._context / self.running if self.running else 1.0
        self._pace.fit(max(self.running, 1.0), context, self._reading, self._prompt, self._answer)
        self._arrive(end)
        self._read(end)
        self._admit(end)
        self._decode(end)

    def _arrive(self, end: float) -> None:
        packets, counts = self.packets, self.counts
        while self._next < len(packets) and packets[self._next].at < end:
            one = packets[self._next]
            self._queues[self._turn[one.kind]].append([one.prompt * one.weight, self._next])
            self.queued += one.prompt * one.weight
            counts.note_came(one)
            self._prompt += _NEWEST * (one.prompt - self._prompt)
            self._answer += _NEWEST * (one.answer - self._answer)
            self._next += 1

    def _next_queue(self, at: float) -> deque[list[float]] | None:
        """The first by turn in which somebody waits then; else where somebody comes next."""
        queues = [one for one in self._queues if one]

        def came(queue: deque[list[float]]) -> float:
            return self.packets[int(queue[0][1])].at

        first = next((one for one in queues if came(one) <= at), None)
        return first or min(queues, key=came, default=None)

    def _read(self, end: float) -> None:
        rate, at, busy = self.sizes.prefill * self._pace.read_rate, self.now, 0.0
        while at < end and (queue := self._next_queue(at)):
            head = queue[0]
            one = self.packets[int(head[1])]
            at = max(at, one.at)
            taken = min(head[0], rate * (end - at))
            at += taken / rate
            busy += taken / rate
            head[0] -= taken
            self.queued -= taken
            if head[0] > 1e-6:
                break
            queue.popleft()
            done = max(at, one.at + one.prompt / self._pace.read_rate)
            heappush(self._handed, (done + self.stages.tables.hand_over(one.prompt), int(head[1])))
        self._reading = self.sizes.prefill * busy / (end - self.now)
        self.counts.prefill_busy += self.sizes.prefill * busy

    def _admit(self, end: float) -> None:
        while self._handed and self._handed[0][0] < end:
            ready, number = heappop(self._handed)
            heappush(self._waiting, (self._turn[self.packets[number].kind], ready, number))
        step = max(self._pace.step, _SHORT_STEP)
        pace = self.stages.yielded / step
        while self._waiting:
            _, ready, number = self._waiting[0]
            one = self.packets[number]
            room = (one.prompt + one.answer) * one.weight
            if self._kept and self._kept + room > self._room:
                return
            heappop(self._waiting)
            first = max(ready, self.now) + step / 2
            begins = self._progress + (first - self.now) * pace
            heappush(self._ends, (begins + max(one.answer - 1, 0), number, first))
            self._kept += room
            self.running += one.weight
            self._context += (one.prompt + one.answer / 2) * one.weight
            self.counts.note_first(one, first)

    def _decode(self, end: float) -> None:
        step = max(self._pace.step, _SHORT_STEP)
        seconds = end - self.now
        paused = min(self._pause, seconds)
        self._pause -= paused
        pace = self.stages.yielded / step * (seconds - paused) / seconds
        before, self._progress = self._progress, self._progress + pace * seconds
        self.counts.tokens += self.running * pace * seconds
        while self._ends and self._ends[0][0] <= self._progress:
            beyond, number, first = heappop(self._ends)
            ended = max(first, self.now + (beyond - before) / pace)
            self._say_ended(self.packets[number], first, ended)

    def _say_ended(self, one: Packet, first: float, ended: float) -> None:
        self.running = max(0.0, self.running - one.weight)
        self._kept = max(0.0, self._kept - (one.prompt + one.answer) * one.weight)
        self._context = max(0.0, self._context - (one.prompt + one.answer / 2) * one.weight)
        self.counts.note_ended(one, first, ended)
