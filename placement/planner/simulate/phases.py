"""Requests on pools that read prompts and pools that decode, event by event: when first tokens come, and last ones.

One pool does both (prompts in chunks, beside decoding), or prompts go to some and their KV is handed over to others.
A pool runs one step after the other, and so does each rank that reads prompts beside shared experts; what a step lasts
is `phase_stages`' to say. A request is let in where it decodes once there is room for the KV of its prompt and answer.
It draws nothing at random and reads nothing.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from afserve.placement.planner.simulate.phase_stages import IDLE, Pieces, together
from afserve.placement.planner.simulate.station import NEVER, Pool, SimulatedRequest, Station

_LAST = sys.float_info.max  # seconds: everything that ever happens
_BLOCK = 16  # tokens of a KV block


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

    first: float = NEVER
    ended: float = NEVER


@dataclass(frozen=True, slots=True)
class GoodputTargets:
    """Seconds to the first token and per further one."""

    ttft: float
    tpot: float

    def met(self, asked: SimulatedRequest, times: RequestTimes) -> bool:
        further = max(asked.answer - 1, 1)
        return times.first - asked.at <= self.ttft and times.ended - times.first <= self.tpot * further


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
            Station(number, pool, chunk, asked, ranks)
            for number, (pool, chunk, ranks) in enumerate(reads + decodes)
        ]
        self._reads = self._stations[: len(reads)]
        self._decodes = self._reads if layout.both else self._stations[len(reads) :]
        self._handed: list[tuple[float, int]] = []  # (when its KV is there, request)
        self._reading = 0  # tokens of prompts in the steps that run
        self._running: list[tuple[float, int]] = []  # (end of its step, station)
        self.came = 0  # requests

    @property
    def over(self) -> bool:
        return not (self._running or self._handed) and self.came == len(self._asked)

    @property
    def decoding(self) -> int:
        """Requests."""
        return sum(one.running for one in self._decodes)

    @property
    def queued(self) -> int:
        """Tokens of prompts that are not read."""
        return sum(one.queued for one in self._stations)

    @property
    def reading_seconds(self) -> float:
        """Of all ranks that read, in steps that have begun."""
        return sum(one.busy for one in self._stations if one.chunk)

    def play(self, until: float = _LAST) -> Iterator[int]:
        """Yields the number of each request that ends; what comes later than `until` is for another call."""
        while True:
            ends = self._running[0][0] if self._running else NEVER
            arrival = self._asked[self.came].at if self.came < len(self._asked) else NEVER
            handed = self._handed[0][0] if self._handed else NEVER
            now = min(ends, arrival, handed)
            if now > until:
                return
            self.now = now
            if now == arrival:
                station = self._arrive(self.came)
                self.came += 1
            elif now == handed:
                station = min(self._decodes, key=lambda one: one.running + len(one.waiting))
                station.waiting.append(heappop(self._handed)[1])
            else:
                station = self._stations[heappop(self._running)[1]]
                yield from self._end(station, now)
            if station.until == NEVER:
                self._start(station, now)

    def resize(self, reads: Pool, decodes: Pool) -> None:
        """Other devices from their next steps on, where one pool reads prompts rank by rank and one decodes. A reader
        that goes reads on what it has begun; the others have what waits there."""
        readers = [one for one in self._stations if one.chunk]
        for station in readers:
            station.pool = reads
        while len(readers) < reads.ranks:
            readers.append(Station(len(self._stations), reads, self._layout.chunk, self._asked, 1))
            self._stations.append(readers[-1])
        self._reads = readers[: reads.ranks]
        for station in readers[reads.ranks :]:
            for number in station.give_back():
                self._arrive(number)
        self._decodes[0].become(decodes)
        for station in self._stations:
            if station.until == NEVER:
                self._start(station, self.now)

    def _start(self, station: Station, now: float) -> None:
        self._begin(station, now)
        if station.until != NEVER:
            heappush(self._running, (station.until, station.number))

    def _arrive(self, number: int) -> Station:
        station = min(self._reads, key=lambda one: (one.queued + len(one.waiting), one.running))
        if self._layout.both:
            station.waiting.append(number)
        else:
            station.read_prompt(number)
        return station

    def _begin(self, station: Station, now: float) -> None:
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
            other = together([one.step for one in self._stations if one.chunk])
        station.begin(now, other, self._layout.pieces, beside)
        self._reading += station.reading

    def _take_over(self, station: Station, number: int, now: float) -> None:
        """A prompt that another pool has read, between two steps."""
        if self._layout.first_there:
            station.decode(number)
            return
        self.times[number].first = now
        station.decode(number, tail=self._asked[number].prompt % _BLOCK)

    def _end(self, station: Station, now: float) -> Iterator[int]:
        self._reading -= station.reading
        ended, read = station.end()
        station.until, station.step = NEVER, IDLE
        for number in ended:
            self.times[number].ended = now
            yield number
        for number in read:
            yield from self._was_read(station, number, now)

    def _was_read(self, station: Station, number: int, now: float) -> Iterator[int]:
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
