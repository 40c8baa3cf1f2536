"""Requests on pools that read prompts and pools that decode, event by event: when first tokens come, and last ones.

One pool does both (prompts in chunks, beside decoding), or prompts go to some and their KV is handed over to others.
A pool runs one step after the other, and so does each rank that reads prompts beside shared experts; what a step lasts
is `phase_stages`' to say. A request is let in where it decodes once there is room for the KV of its prompt and answer.
It draws nothing at random and reads nothing.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

from afserve.placement.planner.simulate.phase_stages import IDLE, Apart, Beside, Pieces, Together, together
from afserve.placement.planner.simulate.phase_tables import StepTimes, Work

Pool = Together | Apart | Beside
_NEVER = float("inf")
_BLOCK = 16  # tokens of a KV block
_DOUBLE = 16384  # tokens before it with which a token takes about twice as long


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """Seconds of arrival, tokens of prompt and answer."""

    at: float
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class PhaseLayout:
    """`both` pools do everything, or `reads` and `decodes` share the work. `chunk`: prompt tokens of a rank in a step;
    they count for more the more they attend to, so that long prompts make steps little longer.
    `pieces`: the two share expert devices, which compute prompts in such pieces. `first_there`: the pool that reads a
    prompt also draws its first token. Else, as in this engine, the pool that decodes draws it between two steps, from
    the row that came with the last block; what of the prompt filled no block it computes with the request's next token.
    """

    chunk: int
    both: tuple[Pool, ...] = ()
    reads: tuple[Pool, ...] = ()
    decodes: tuple[Pool, ...] = ()
    pieces: Pieces | None = None
    first_there: bool = False


@dataclass(slots=True)
class RequestTimes:
    """Of one request, seconds: its first token and its last, since nothing."""

    first: float = _NEVER
    ended: float = _NEVER


@dataclass(frozen=True, slots=True)
class GoodputTargets:
    """Seconds to the first token and per further one."""

    ttft: float
    tpot: float

    def met(self, asked: SimulatedRequest, times: RequestTimes) -> bool:
        further = max(asked.answer - 1, 1)
        return times.first - asked.at <= self.ttft and times.ended - times.first <= self.tpot * further


@dataclass(slots=True)
class _Prompt:
    number: int
    tokens: int
    done: int = 0


@dataclass
class _Station:
    """`ranks` of a pool that step together, with what waits there and what they run."""

    number: int
    pool: Pool
    chunk: int
    asked: Sequence[SimulatedRequest]
    ranks: int
    free: float = 0.0  # tokens of KV
    queues: list[deque[_Prompt]] = field(default_factory=list)  # by rank
    unread: list[int] = field(default_factory=list)  # tokens in each queue
    waiting: deque[int] = field(default_factory=deque)  # for room
    ends: list[tuple[int, int]] = field(default_factory=list)  # (step of its last token, request)
    running: int = 0
    context: float = 0.0
    steps: int = 0
    until: float = _NEVER
    step: StepTimes = IDLE
    queued: int = 0  # tokens of prompts that are not computed
    reading: int = 0  # of those, in this step
    read: list[int] = field(default_factory=list)  # prompts that this step completes
    tails: int = 0  # tokens at the ends of prompts that the next step computes
    yielded: float = 1.0  # tokens of a request in a step

    def __post_init__(self) -> None:
        self.queues = [deque() for _ in range(self.ranks)]
        self.unread = [0] * self.ranks
        self.free = self.pool.kv_tokens
        self.yielded = self.pool.tables.setting.tokens_per_step

    def read_prompt(self, number: int) -> None:
        """On the rank that has the fewest tokens to read."""
        tokens = self.asked[number].prompt
        shortest = self.unread.index(min(self.unread))
        self.queues[shortest].append(_Prompt(number, tokens))
        self.unread[shortest] += tokens
        self.queued += tokens

    def admits(self, number: int) -> bool:
        """Takes the room for its KV where there is enough."""
        one = self.asked[number]
        if one.prompt + one.answer > self.free:
            return False
        self.free -= one.prompt + one.answer
        return True

    def decode(self, number: int, *, tail: int = 0) -> None:
        """The first token of its answer is there; `tail` tokens of its prompt are not computed."""
        one = self.asked[number]
        heappush(self.ends, (self.steps + max(ceil((one.answer - 1) / self.yielded), 1), number))
        self.running += 1
        self.context += one.prompt + 1
        self.tails += tail

    def begin(self, now: float, other: StepTimes, pieces: Pieces | None, beside: int) -> None:
        """The next step, where there is anything to do. `beside`: prompt tokens of other ranks at these experts."""
        tokens, pairs, total = self._read_on() if self.queued else (0, 0, 0)
        if not tokens and not self.running:
            self.until, self.step = _NEVER, IDLE
            return
        self.reading = total
        rows, self.tails = self.running + self.tails, 0
        context = self.context / self.running if self.running else 0.0
        work = Work(-(-rows // self.ranks), rows, context, tokens, pairs, total + beside)
        self.step = self.pool.step(work, other, pieces)
        self.until = now + self.step.seconds

    def _read_on(self) -> tuple[int, int, int]:
        """Takes a chunk of each rank's queue. (tokens and pairs of the fullest rank, tokens of all)."""
        tokens = pairs = total = 0
        for rank, queue in enumerate(self.queues):
            mine, seen, spent = 0, 0, 0.0
            while queue and spent < self.chunk:
                head = queue[0]
                each = 1 + head.done / _DOUBLE
                taken = min(head.tokens - head.done, max(1, int((self.chunk - spent) / each)))
                spent += taken * each
                seen += taken * head.done + taken * taken // 2
                mine, head.done = mine + taken, head.done + taken
                if head.done == head.tokens:
                    self.read.append(queue.popleft().number)
            self.unread[rank] -= mine
            tokens, pairs, total = max(tokens, mine), max(pairs, seen), total + mine
        return tokens, pairs, total

    def end(self) -> tuple[list[int], list[int]]:
        """(requests that ended, prompts that are read)."""
        self.steps += 1
        self.queued -= self.reading
        self.reading = 0
        self.context += self.running * self.yielded
        ended = []
        while self.ends and self.ends[0][0] <= self.steps:
            number = heappop(self.ends)[1]
            one = self.asked[number]
            ended.append(number)
            self.running -= 1
            self.context -= one.prompt + one.answer
            self.free += one.prompt + one.answer
        if not self.running:
            self.context = 0.0
        read, self.read = self.read, []
        return ended, read


class PhasesRun:
    """One run of `asked`, in order of arrival, on `layout`."""

    def __init__(self, layout: PhaseLayout, asked: Sequence[SimulatedRequest]) -> None:
        self.times = [RequestTimes() for _ in asked]
        self.now = 0.0
        self._layout, self._asked = layout, asked
        reads = [
            (pool, layout.chunk, ranks)
            for pool in layout.both or layout.reads
            for ranks in ([1] * pool.ranks if layout.pieces else [pool.ranks])
        ]
        decodes = [(pool, 0, pool.ranks) for pool in layout.decodes]
        self._stations = [
            _Station(number, pool, chunk, asked, ranks)
            for number, (pool, chunk, ranks) in enumerate(reads + decodes)
        ]
        self._reads = self._stations[: len(reads)]
        self._decodes = self._reads if layout.both else self._stations[len(reads) :]
        self._handed: list[tuple[float, int]] = []  # (when its KV is there, request)
        self._reading = 0  # tokens of prompts in the steps that run

    def play(self) -> Iterator[int]:
        """Yields the number of each request that ends."""
        upcoming = 0
        running: list[tuple[float, int]] = []  # (end of its step, station)
        while True:
            ends = running[0][0] if running else _NEVER
            arrival = self._asked[upcoming].at if upcoming < len(self._asked) else _NEVER
            handed = self._handed[0][0] if self._handed else _NEVER
            self.now = now = min(ends, arrival, handed)
            if now == _NEVER:
                return
            if now == arrival:
                station = self._arrive(upcoming)
                upcoming += 1
            elif now == handed:
                station = min(self._decodes, key=lambda one: one.running + len(one.waiting))
                station.waiting.append(heappop(self._handed)[1])
            else:
                station = self._stations[heappop(running)[1]]
                yield from self._end(station, now)
            if station.until == _NEVER:
                self._begin(station, now)
                if station.until != _NEVER:
                    heappush(running, (station.until, station.number))

    def _arrive(self, number: int) -> _Station:
        station = min(self._reads, key=lambda one: (one.queued + len(one.waiting), one.running))
        if self._layout.both:
            station.waiting.append(number)
        else:
            station.read_prompt(number)
        return station

    def _begin(self, station: _Station, now: float) -> None:
        while station.waiting and station.admits(station.waiting[0]):
            number = station.waiting.popleft()
            if self._layout.both:
                station.read_prompt(number)
            else:
                self._take_over(station, number, now)
        if not station.running and not station.queued:
            return
        other, beside = IDLE, 0
        if self._layout.pieces is not None and station.chunk:
            other = together([one.step for one in self._decodes])
            beside = self._reading
        elif self._layout.pieces is not None:
            other = together([one.step for one in self._reads])
        station.begin(now, other, self._layout.pieces, beside)
        self._reading += station.reading

    def _take_over(self, station: _Station, number: int, now: float) -> None:
        """A prompt that another pool has read, between two steps."""
        if self._layout.first_there:
            station.decode(number)
            return
        self.times[number].first = now
        station.decode(number, tail=self._asked[number].prompt % _BLOCK)

    def _end(self, station: _Station, now: float) -> Iterator[int]:
        self._reading -= station.reading
        ended, read = station.end()
        station.until, station.step = _NEVER, IDLE
        for number in ended:
            self.times[number].ended = now
            yield number
        for number in read:
            yield from self._was_read(station, number, now)

    def _was_read(self, station: _Station, number: int, now: float) -> Iterator[int]:
        one, times = self._asked[number], self.times[number]
        if self._layout.both or self._layout.first_there:
            times.first = now
            if one.answer <= 1:
                times.ended = now
                if self._layout.both:
                    station.free += one.prompt + one.answer
                yield number
                return
        if self._layout.both:
            station.decode(number)
        else:
            heappush(self._handed, (now + station.pool.tables.hand_over(one.prompt), number))
