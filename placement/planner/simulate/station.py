"""One pool of a simulation of requests: what its ranks read and decode, step after step. It knows no other pool."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

from afserve.placement.planner.simulate.phase_stages import IDLE, Apart, Beside, Pieces, Together
from afserve.placement.planner.simulate.phase_tables import StepTimes, Work

Pool = Together | Apart | Beside
NEVER = float("inf")
_DOUBLE = 16384  # tokens before it with which a token takes about twice as long


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """Seconds of arrival, tokens of prompt and answer."""

    at: float
    prompt: int
    answer: int


@dataclass(slots=True)
class _Prompt:
    number: int
    tokens: int
    done: int = 0


@dataclass
class Station:
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
    until: float = NEVER
    step: StepTimes = IDLE
    queued: int = 0  # tokens of prompts that are not computed
    reading: int = 0  # of those, in this step
    read: list[int] = field(default_factory=list)  # prompts that this step completes
    tails: int = 0  # tokens at the ends of prompts that the next step computes
    yielded: float = 1.0  # tokens of a request in a step
    pause: float = 0.0  # seconds more of the next step
    busy: float = 0.0  # seconds of all steps

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

    def give_back(self) -> list[int]:
        """Prompts of which nothing is read; another pool has them from now on."""
        back: list[int] = []
        for rank, queue in enumerate(self.queues):
            whole = [one for one in queue if not one.done]
            tokens = sum(one.tokens for one in whole)
            self.queues[rank] = deque(one for one in queue if one.done)
            self.unread[rank] -= tokens
            self.queued -= tokens
            back += [one.number for one in whole]
        return back

    def become(self, pool: Pool) -> None:
        """Of other devices from the next step on. Requests on ranks that go wait until their KV is elsewhere."""
        gone = max(0, self.ranks - pool.ranks)
        if gone and self.running:
            self.pause += gone / self.ranks * pool.tables.hand_over(self.context / self.running)
        self.free += pool.kv_tokens - self.pool.kv_tokens
        self.pool, self.ranks = pool, pool.ranks

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
            self.until, self.step = NEVER, IDLE
            return
        self.reading = total
        rows, self.tails = self.running + self.tails, 0
        context = self.context / self.running if self.running else 0.0
        work = Work(-(-rows // self.ranks), rows, context, tokens, pairs, total + beside)
        self.step = self.pool.step(work, other, pieces)
        self.until = now + self.step.seconds + self.pause
        self.pause, self.busy = 0.0, self.busy + self.step.seconds

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
