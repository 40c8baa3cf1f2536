"""Simulates requests on one deployment, from arrival over waiting, prompt and decoding to the last token.

It gives TTFT, TPOT and goodput. Ranks are independent queues, fed in turn. A step of a rank lasts what the closed form
says for the requests that it holds then, times a random factor from the layer-level simulation, plus the prompts that
it admits. A rank can give away what it holds, and take what others held. Values in, values out.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, isnan, nan

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.simulate.pace import ALWAYS, SpeedProfile

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Seconds, prompt and answer tokens per request, by arrival. asked: when a request was sent, where other devices
    read it first."""

    seconds: Array
    prompt: Array
    answer: Array
    asked: Array | None = None


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """What only reads prompts. workers: instances, of one device or of several that share each prompt. busy, latency:
    seconds per prompt token that an instance is taken, and until the cache is where it is decoded."""

    workers: int
    busy: float
    latency: float


def read_first(pool: PrefillPool, sent: Sequence[Arrivals], pace: SpeedProfile = ALWAYS) -> list[Arrivals]:
    """Each rank's arrivals once one pool has read the prompts of all of them, first come, first served; pace: when it
    stands still or is slow."""
    seconds, prompt = (np.concatenate([getattr(one, name) for one in sent]) for name in ("seconds", "prompt"))
    done, free = np.empty_like(seconds), [0.0] * pool.workers
    for place in np.argsort(seconds, kind="stable"):
        begun = max(float(seconds[place]), heapq.heappop(free))
        heapq.heappush(free, pace.end(begun, pool.busy * float(prompt[place])))
        done[place] = pace.end(begun, pool.latency * float(prompt[place]))
    found = []
    for one, ready in zip(
        sent, np.split(done, np.cumsum([len(one.seconds) for one in sent])[:-1]), strict=True
    ):
        order = np.argsort(ready, kind="stable")
        found.append(Arrivals(ready[order], one.prompt[order], one.answer[order], one.seconds[order]))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """step[n]: seconds of a step with n requests (n = 0..slots). factors: what to multiply steps by, drawn evenly.
    prompt_second: seconds one prompt token adds to the step that admits it; chunk: prompt tokens per step at most.
    ahead: a step is put together while the one before it runs, so what arrives meanwhile waits for the next but one."""

    slots: int
    step: Array
    factors: Array
    prompt_second: float
    tokens_per_step: float = 1.0
    chunk: float = 8192.0
    ahead: bool = False


@dataclass(slots=True)
class ServedRequests:
    """Per finished request, seconds: time to first token, per output token, and when it ended. weight: what one of
    them counts; requests, tokens: what ended. stalls: from the loss of a rank to the next token, of those that
    went on."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    tokens: float = 0.0
    requests: float = 0.0
    seconds: float = 0.0

    def add(self, one: "RankRequest", now: float) -> None:
        """Its last token has come."""
        self.ttft.append(one.first - one.asked)
        self.tpot.append((now - one.first) / max(one.answer - 1, 1.0))
        self.ended.append(now)
        self.weight.append(1.0)
        self.tokens += one.answer
        self.requests += 1
        self.seconds = max(self.seconds, now)


def poisson(rate: float, count: int, prompt: Array, answer: Array, rng: np.random.Generator) -> Arrivals:
    """`count` arrivals at `rate` per second with lengths drawn together from the samples."""
    picked = rng.integers(0, len(prompt), count)
    return Arrivals(np.cumsum(rng.exponential(1 / rate, count)), prompt[picked], answer[picked])


@dataclass(slots=True)
class RankRequest:
    """at: when it is there to be admitted. left: tokens of the answer that are to come. read: tokens to compute when it
    is admitted, `second` seconds each. first: when its first token came; lost: when its rank was, until its next
    token; NaN else."""

    at: float
    asked: float
    prompt: float
    answer: float
    left: float
    read: float
    second: float
    first: float = nan
    lost: float = nan


class RankServing:
    """One rank, adding what ends to `done`. pace: when it stands still or is slow."""

    def __init__(
        self,
        rank: Rank,
        arrivals: Arrivals,
        rng: np.random.Generator,
        done: ServedRequests,
        pace: SpeedProfile = ALWAYS,
    ) -> None:
        self._rank, self._rng, self._done, self._pace = rank, rng, done, pace
        asked = arrivals.seconds if arrivals.asked is None else arrivals.asked
        columns = (arrivals.seconds, asked, arrivals.prompt, arrivals.answer)
        self._coming = deque(
            RankRequest(at, sent, prompt, answer, answer, prompt, rank.prompt_second)
            for at, sent, prompt, answer in zip(*(column.tolist() for column in columns), strict=True)
        )
        self._held: list[tuple[int, int, RankRequest]] = []  # (its last step, its number, it)
        self._steps = self._admitted = 0
        self._now, self._before = 0.0, 0.0

    def play(self, until: float = inf) -> Iterator[float]:
        """Every step that ends by then; yields the share of requests admitted."""
        told = self._admitted
        while (self._coming or self._held) and self._step(until):
            if self._admitted != told:
                told = self._admitted
                yield told / (told + len(self._coming))

    def take(self, until: float) -> tuple[list[RankRequest], list[RankRequest]]:
        """(what it holds, with the tokens that were computed of it to be read; what waits or would come before
        `until`). It holds nothing afterwards, and does nothing before `until`."""
        for last, _, one in self._held:
            one.left -= self._rank.tokens_per_step * (self._needs(one) - last + self._steps)
            one.read = one.prompt + one.answer - one.left
        held = [one for _, _, one in sorted(self._held, key=lambda entry: entry[1])]
        early = [one for one in self._coming if one.at < until]
        self._held, self._coming = [], deque(one for one in self._coming if one.at >= until)
        self._now = self._before = max(until, self._now)
        return held, early

    def give(self, more: Sequence[RankRequest]) -> None:
        """Further requests, none of them before what it has played."""
        self._coming = deque(sorted((*self._coming, *more), key=lambda one: one.at))

    def _step(self, until: float) -> bool:
        """The next step, if it ends in time."""
        now, before, rank = self._now, self._before, self._rank
        if not self._held:
            now = before = max(now, self._coming[0].at)
        admitted, reading = self._admits(before if rank.ahead else now)
        factor = rank.factors[self._rng.integers(0, len(rank.factors))]
        end = self._pace.end(now, float(rank.step[len(self._held) + admitted] * factor) + reading)
        if end > until:
            return False
        self._now, self._before = end, now
        for _ in range(admitted):
            self._hold(self._coming.popleft())
        self._steps += 1
        while self._held and self._held[0][0] <= self._steps:
            self._done.add(heapq.heappop(self._held)[2], end)
        return True

    def _admits(self, closed: float) -> tuple[int, float]:
        """How many begin now, and the seconds that their prompts take."""
        count, tokens, reading = 0, 0.0, 0.0
        for one in self._coming:
            full = len(self._held) + count == self._rank.slots
            if full or one.at > closed or (tokens and tokens + one.read > self._rank.chunk):
                break
            tokens += one.read
            reading += one.read * one.second
            count += 1
        return count, reading

    def _hold(self, one: RankRequest) -> None:
        """Its first step here has ended."""
        if isnan(one.first):
            one.first = self._now
        if not isnan(one.lost):
            self._done.stalls.append(self._now - one.lost)
            one.lost = nan
        self._admitted += 1
        heapq.heappush(self._held, (self._steps + self._needs(one), self._admitted, one))

    def _needs(self, one: RankRequest) -> int:
        """Steps until its last token."""
        return max(ceil(one.left / self._rank.tokens_per_step - 1e-9), 1)


def serve(rank: Rank, arrivals: Arrivals, rng: np.random.Generator, done: ServedRequests) -> Iterator[float]:
    """One rank until its last request ends, adding to `done`; yields the share of requests admitted."""
    return RankServing(rank, arrivals, rng, done).play()


def goodput(done: ServedRequests, tpot: float, ttft: float) -> float:
    """Requests per second that met both targets: the share of the kept ones, of all that ended."""
    return share_inside(done, tpot, ttft) * done.requests / done.seconds if done.seconds else 0.0


def agentx(done: ServedRequests, answer: float) -> float:
    """Tokens per second and user as InferenceX's AgentX counts them: one over the 90th percentile of a request's whole
    latency per output token, here for answers of the mean length; 0 where none was kept."""
    if not done.ttft:
        return 0.0
    each = [first / max(answer, 1.0) + after for first, after in zip(done.ttft, done.tpot, strict=True)]
    return 1 / percentile(each, done.weight, 0.9)


def share_inside(done: ServedRequests, tpot: float, ttft: float) -> float:
    """The share of the kept requests that met both targets; 0 where none was kept."""
    met = sum(
        weight
        for a, b, weight in zip(done.ttft, done.tpot, done.weight, strict=True)
        if a <= ttft and b <= tpot
    )
    return met / sum(done.weight) if done.ttft else 0.0


def percentile(values: Sequence[float], weight: Sequence[float], share: float) -> float:
    """The least value that so much of the weight (0 to 1) does not exceed."""
    order = np.argsort(values, kind="stable")
    under = np.cumsum(np.asarray(weight)[order])
    at = int(np.searchsorted(under, share * under[-1] * (1 - 1e-12)))
    return float(np.asarray(values)[order][min(at, len(order) - 1)])


def together(ranks: Sequence[ServedRequests], warm: float, weights: Sequence[float] = ()) -> ServedRequests:
    """Ranks side by side, each with the weight of those it stands for. The first `warm` of each rank's requests found
    it half empty: their times are left out."""
    total = ServedRequests()
    for one, weight in zip(ranks, weights or [1.0] * len(ranks), strict=True):
        skipped = int(warm * len(one.ttft))
        total.ttft.extend(one.ttft[skipped:])
        total.tpot.extend(one.tpot[skipped:])
        total.weight.extend([weight] * len(one.ttft[skipped:]))
        total.ended.extend(one.ended)
        total.stalls.extend(one.stalls)
        total.tokens += weight * one.tokens
        total.requests += weight * one.requests
        total.seconds = max(total.seconds, one.seconds)
    return total
