"""Simulates requests on one deployment, from arrival over waiting, prompt and decoding to the last token.

It gives TTFT, TPOT and goodput. Ranks are independent queues, fed in turn. A step of a rank lasts what the closed form
says for the requests that it holds then, times a random factor from the layer-level simulation, plus the prompts that
it admits. A rank can give away what it holds, and take what others held. Values in, values out.

A request is a row of a table; the columns are AT (when it is there to be admitted), ASKED (when it was sent), PROMPT,
ANSWER, LEFT (tokens), FIRST (when its first token came, NaN before), READ (tokens to compute when it is admitted),
SECOND (seconds for each of them), LOST (when its rank was lost, NaN but until the next token).
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.simulate.pace import ALWAYS, SpeedProfile

Array = NDArray[np.float64]
AT, ASKED, PROMPT, ANSWER, LEFT, FIRST, READ, SECOND, LOST = range(9)
COLUMNS = 9


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


def poisson(rate: float, count: int, prompt: Array, answer: Array, rng: np.random.Generator) -> Arrivals:
    """`count` arrivals at `rate` per second with lengths drawn together from the samples."""
    picked = rng.integers(0, len(prompt), count)
    return Arrivals(np.cumsum(rng.exponential(1 / rate, count)), prompt[picked], answer[picked])


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
        self._queue = _table(arrivals, rank.prompt_second)
        self._held = self._queue[:0]
        self._upcoming, self._now, self._before = 0, 0.0, 0.0

    def play(self, until: float = np.inf) -> Iterator[float]:
        """Every step that ends by then; yields the share of requests admitted."""
        told = self._upcoming
        while (self._upcoming < len(self._queue) or len(self._held)) and self._step(until):
            if self._upcoming != told:
                told = self._upcoming
                yield told / len(self._queue)

    def take(self, until: float) -> tuple[Array, Array]:
        """(what it holds, with the tokens that were computed of it as READ; what waits or would come before `until`).
        It holds nothing afterwards, and does nothing before `until`."""
        held = self._held.copy()
        held[:, READ] = held[:, PROMPT] + held[:, ANSWER] - held[:, LEFT]
        coming = self._queue[self._upcoming :]
        early = coming[:, AT] < until
        self._queue, self._upcoming, self._held = coming[~early], 0, held[:0]
        self._now = self._before = max(until, self._now)
        return held, coming[early].copy()

    def give(self, more: Array) -> None:
        """Further requests, none of them before what it has played."""
        together = np.concatenate([self._queue[self._upcoming :], more])
        self._queue = together[np.argsort(together[:, AT], kind="stable")]
        self._upcoming = 0

    def _step(self, until: float) -> bool:
        """The next step, if it ends in time."""
        now, before = self._now, self._before
        if not len(self._held):
            now = before = max(now, float(self._queue[self._upcoming, AT]))
        admitted, reading = self._admitted(before if self._rank.ahead else now)
        held = np.concatenate([self._held, self._queue[admitted]])
        seconds = float(self._rank.step[len(held)]) * float(self._rng.choice(self._rank.factors)) + reading
        end = self._pace.end(now, seconds)
        if end > until:
            return False
        self._now, self._before = end, now
        self._upcoming += len(held) - len(self._held)
        self._end(held)
        return True

    def _admitted(self, closed: float) -> tuple[slice, float]:
        """Those that begin now, and the seconds that their prompts take."""
        queue, rank, at = self._queue, self._rank, self._upcoming
        most = min(len(queue), at + rank.slots - len(self._held))
        tokens = reading = 0.0
        while at < most and queue[at, AT] <= closed:
            if tokens and tokens + queue[at, READ] > rank.chunk:
                break
            tokens += float(queue[at, READ])
            reading += float(queue[at, READ] * queue[at, SECOND])
            at += 1
        return slice(self._upcoming, at), reading

    def _end(self, held: Array) -> None:
        now, done = self._now, self._done
        held[:, LEFT] -= self._rank.tokens_per_step
        held[np.isnan(held[:, FIRST]), FIRST] = now
        moved = ~np.isnan(held[:, LOST])
        if moved.any():
            done.stalls.extend((now - held[moved, LOST]).tolist())
            held[moved, LOST] = np.nan
        ended = held[:, LEFT] <= 0
        if ended.any():
            _finish(done, now, held[ended])
            held = held[~ended]
        self._held = held


def serve(rank: Rank, arrivals: Arrivals, rng: np.random.Generator, done: ServedRequests) -> Iterator[float]:
    """One rank until its last request ends, adding to `done`; yields the share of requests admitted."""
    return RankServing(rank, arrivals, rng, done).play()


def _table(arrivals: Arrivals, second: float) -> Array:
    table = np.full((len(arrivals.seconds), COLUMNS), np.nan)
    table[:, AT] = arrivals.seconds
    table[:, ASKED] = arrivals.seconds if arrivals.asked is None else arrivals.asked
    table[:, PROMPT] = table[:, READ] = arrivals.prompt
    table[:, ANSWER] = table[:, LEFT] = arrivals.answer
    table[:, SECOND] = second
    return table


def _finish(done: ServedRequests, now: float, ended: Array) -> None:
    first, answer = ended[:, FIRST], ended[:, ANSWER]
    done.ttft.extend((first - ended[:, ASKED]).tolist())
    done.tpot.extend(((now - first) / np.maximum(answer - 1, 1.0)).tolist())
    done.ended.extend([now] * len(ended))
    done.weight.extend([1.0] * len(ended))
    done.tokens += float(answer.sum())
    done.requests += len(ended)
    done.seconds = max(done.seconds, now)


def goodput(done: ServedRequests, tpot: float, ttft: float) -> float:
    """Requests per second that met both targets: the share of the kept ones, of all that ended."""
    met = sum(
        weight
        for a, b, weight in zip(done.ttft, done.tpot, done.weight, strict=True)
        if a <= ttft and b <= tpot
    )
    return met / sum(done.weight) * done.requests / done.seconds if done.seconds and done.ttft else 0.0


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
