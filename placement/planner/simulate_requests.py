"""Simulates requests on one deployment, from arrival over waiting, prompt and decoding to the last token.

It gives TTFT, TPOT and goodput. Ranks are independent queues, fed in turn. A step of a rank lasts what the closed form
says for the requests that it holds then, times a random factor from the layer-level simulation, plus the prompts that
it admits. Values in, values out.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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
class Pool:
    """What only reads prompts. workers: instances. busy, latency: seconds per prompt token that an instance is taken,
    and until the cache is where it is decoded."""

    workers: int
    busy: float
    latency: float


def read_first(pool: Pool, sent: Sequence[Arrivals]) -> list[Arrivals]:
    """Each rank's arrivals once one pool has read the prompts of all of them, first come, first served."""
    seconds, prompt = (np.concatenate([getattr(one, name) for one in sent]) for name in ("seconds", "prompt"))
    done, free = np.empty_like(seconds), [0.0] * pool.workers
    for place in np.argsort(seconds, kind="stable"):
        begun = max(float(seconds[place]), heapq.heappop(free))
        heapq.heappush(free, begun + pool.busy * float(prompt[place]))
        done[place] = begun + pool.latency * float(prompt[place])
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
class Served:
    """Per finished request, seconds: time to first token, per output token, and when it ended."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    tokens: float = 0.0
    seconds: float = 0.0


def poisson(rate: float, count: int, prompt: Array, answer: Array, rng: np.random.Generator) -> Arrivals:
    """`count` arrivals at `rate` per second with lengths drawn together from the samples."""
    picked = rng.integers(0, len(prompt), count)
    return Arrivals(np.cumsum(rng.exponential(1 / rate, count)), prompt[picked], answer[picked])


def serve(rank: Rank, arrivals: Arrivals, rng: np.random.Generator, done: Served) -> Iterator[float]:
    """One rank until its last request ends, adding to `done`; yields the share of requests admitted."""
    now, before, upcoming, total = 0.0, 0.0, 0, len(arrivals.seconds)
    asked = arrivals.seconds if arrivals.asked is None else arrivals.asked
    left, begun, first, wanted = (np.empty(0) for _ in range(4))
    while upcoming < total or len(left):
        if not len(left):
            now = max(now, float(arrivals.seconds[upcoming]))
            before = now
        closed, before = (before if rank.ahead else now), now
        room, admitted, reading = rank.slots - len(left), upcoming, 0.0
        while admitted < total and admitted - upcoming < room and arrivals.seconds[admitted] <= closed:
            if reading and reading + arrivals.prompt[admitted] > rank.chunk:
                break
            reading += float(arrivals.prompt[admitted])
            admitted += 1
        fresh = slice(upcoming, admitted)
        left = np.concatenate([left, arrivals.answer[fresh]])
        wanted = np.concatenate([wanted, arrivals.answer[fresh]])
        begun = np.concatenate([begun, asked[fresh]])
        first = np.concatenate([first, np.full(admitted - upcoming, np.nan)])
        now += float(rank.step[len(left)]) * float(rng.choice(rank.factors)) + reading * rank.prompt_second
        left -= rank.tokens_per_step
        first = np.where(np.isnan(first), now, first)
        ended = left <= 0
        if ended.any():
            _finish(done, now, begun[ended], first[ended], wanted[ended])
            left, begun, first, wanted = left[~ended], begun[~ended], first[~ended], wanted[~ended]
        if admitted != upcoming:
            upcoming = admitted
            yield upcoming / total


def _finish(done: Served, now: float, begun: Array, first: Array, wanted: Array) -> None:
    done.ttft.extend((first - begun).tolist())
    done.tpot.extend(((now - first) / np.maximum(wanted - 1, 1.0)).tolist())
    done.ended.extend([now] * len(begun))
    done.tokens += float(wanted.sum())
    done.seconds = max(done.seconds, now)


def goodput(done: Served, tpot: float, ttft: float) -> float:
    """Requests per second that met both targets: the share of the kept ones, of all that ended."""
    met = sum(a <= ttft and b <= tpot for a, b in zip(done.ttft, done.tpot, strict=True))
    return met / len(done.ttft) * len(done.ended) / done.seconds if done.seconds and done.ttft else 0.0


def together(ranks: Sequence[Served], warm: float) -> Served:
    """Ranks side by side. The first `warm` of each rank's requests found it half empty: their times are left out."""
    total = Served()
    for one in ranks:
        skipped = int(warm * len(one.ttft))
        total.ttft.extend(one.ttft[skipped:])
        total.tpot.extend(one.tpot[skipped:])
        total.ended.extend(one.ended)
        total.tokens += one.tokens
        total.seconds = max(total.seconds, one.seconds)
    return total
