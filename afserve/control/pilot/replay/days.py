"""Arrivals for replays: a trace as it is, and days made of a trace's lengths by a stated rule.

A made day: the rate follows a cosine with its lowest point at four in the morning (`trough` of the highest), times a
random part of each five minutes, which is drawn from a Gamma distribution of mean 1 (`unevenness` is its coefficient of
variation) and half of which is kept from one to the next; `bursts` a day double it for 2 to 8 minutes, once where they
overlap. Arrivals within a second are Poisson's. With `clumping` the times between arrivals are drawn from a Gamma
distribution instead, of which it is the coefficient of variation, as BurstGPT (arXiv:2401.17644) models bursts; they
are stretched so that the rate is the same. Of more than eight requests a second several travel in a packet: ten at
most, unless more than 64 packets a second come then. Packets come the more evenly then, so that counts over many of
them vary as those of single requests would; those of one packet still come at once and are of one length. Lengths are
those of the trace, in its order, again and again; of each eight packets a second from a place of their own, as of that
many more users: what lasts for minutes in a trace lasts for minutes, and is less of all the more users there are.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from afserve.control.pilot.replay.counts import Packet

_SLOT = 300.0  # seconds
_DAY = 86_400.0
_LOWEST = 4 * 3600.0
_PACKETS, _MOST = 8.0, 64.0  # a second at the highest point: more requests travel in heavier packets
_HEAVY = 10.0  # requests, of which a packet has no more before there are the most packets

Rates = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class MadeDay:
    """`peak` requests per second at the highest point of the cosine."""

    peak: float
    trough: float = 0.3
    unevenness: float = 0.08
    bursts: float = 0.0
    hours: float = 24.0
    seed: int = 0
    clumping: float = 0.0

    @property
    def _slots(self) -> int:
        return int(self.hours * 3600 // _SLOT) + 2


def made_day(day: MadeDay, prompts: Sequence[float], answers: Sequence[float]) -> list[Packet]:
    """In order of arrival."""
    rng = np.random.default_rng(day.seed)
    rates = _rates(day, rng)
    weight = max(1.0, min(day.peak / _PACKETS, _HEAVY), day.peak / _MOST)
    if day.clumping:
        times = _clumped(rates / weight, day.clumping / math.sqrt(weight), rng)
    else:
        times = _poisson(rates, weight, rng)
    places = _places(len(prompts), max(1, round(day.peak / weight / _PACKETS)))
    return [
        Packet(at, int(prompts[place]), int(answers[place]), weight)
        for at, place in zip(times, places, strict=False)
    ]


def _places(count: int, users: int) -> Iterator[int]:
    """Of the lengths, in turns of so many `users` which go through all of them, each from a place of its own on."""
    return ((first + count * user // users) % count for first in itertools.count() for user in range(users))


def burst_spans(day: MadeDay) -> list[tuple[float, float]]:
    """(begin, end) of each burst, in seconds."""
    rng = np.random.default_rng(day.seed)
    _uneven(day.unevenness, day._slots, rng)
    return _bursts(day, rng)


def _poisson(rates: Rates, weight: float, rng: np.random.Generator) -> list[float]:
    upto = (np.cumsum(rng.poisson(rates)) / weight).astype(int)
    return [
        second + (place + rng.random()) / count
        for second, count in enumerate(np.diff(upto, prepend=0).tolist())
        for place in range(count)
    ]


def _clumped(rates: Rates, variation: float, rng: np.random.Generator) -> list[float]:
    """Times of a Gamma renewal process of rate 1, at each of which as many are expected to have come."""
    expected = np.concatenate(([0.0], np.cumsum(rates)))
    count = int(expected[-1] * 1.2 + 100 * variation * (1 + math.sqrt(expected[-1])))
    shape = 1 / variation**2
    came = np.cumsum(rng.gamma(shape, 1 / shape, count))
    found: list[float] = np.interp(came[came < expected[-1]], expected, np.arange(len(expected))).tolist()
    return found


def _rates(day: MadeDay, rng: np.random.Generator) -> Rates:
    """Requests per second, by second."""
    seconds = np.arange(int(day.hours * 3600), dtype=np.float64)
    wave = (1 - np.cos(2 * math.pi * (seconds - _LOWEST) / _DAY)) / 2
    rates = day.peak * (day.trough + (1 - day.trough) * wave)
    drawn = _uneven(day.unevenness, day._slots, rng)
    rates *= np.interp(seconds / _SLOT, np.arange(day._slots), drawn)
    doubled = np.zeros(len(rates), dtype=bool)
    for begin, end in _bursts(day, rng):
        doubled[int(begin) : int(end)] = True
    rates[doubled] *= 2.0
    return rates


def _bursts(day: MadeDay, rng: np.random.Generator) -> list[tuple[float, float]]:
    spans = []
    for _ in range(rng.poisson(day.bursts * day.hours / 24)):
        begin, lasts = rng.uniform(0, day.hours * 3600), rng.uniform(120, 480)
        spans.append((begin, begin + lasts))
    return spans


def _uneven(variation: float, slots: int, rng: np.random.Generator) -> list[float]:
    found, kept = [], 1.0
    for _ in range(slots):
        fresh = rng.gamma(1 / variation**2, variation**2) if variation > 0 else 1.0
        kept = (kept + fresh) / 2
        found.append(kept)
    return found


def traced(
    arrival: Sequence[float], prompts: Sequence[float], answers: Sequence[float], times: float = 1.0
) -> list[Packet]:
    """A trace as it is; each request stands for `times` requests."""
    together = zip(arrival, prompts, answers, strict=True)
    return [Packet(float(at), int(prompt), int(answer), times) for at, prompt, answer in together]
