"""Arrivals for replays: a trace as it is, and days made of a trace's lengths by a stated rule.

A made day: the rate follows a cosine with its lowest point at four in the morning (`trough` of the highest), times a
random part of each five minutes, which is drawn from a Gamma distribution of mean 1 (`unevenness` is its coefficient of
variation; BurstGPT, arXiv:2401.17644, fits Gamma to bursts) and half of which is kept from one to the next; `bursts` a
day multiply it by two for 2 to 8 minutes. Arrivals within a second are Poisson's. Lengths are those of the trace, in
its order, again and again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from afserve.control.pilot.replay.counts import Packet

_SLOT = 300.0  # seconds
_DAY = 86_400.0
_LOWEST = 4 * 3600.0
_PACKETS = 8.0  # a second at the highest point: more requests travel in heavier packets


@dataclass(frozen=True, slots=True)
class MadeDay:
    """`peak` requests per second at the highest point of the cosine."""

    peak: float
    trough: float = 0.3
    unevenness: float = 0.08
    bursts: float = 0.0
    hours: float = 24.0
    seed: int = 0


def made_day(day: MadeDay, prompts: Sequence[float], answers: Sequence[float]) -> list[Packet]:
    """In order of arrival."""
    rng = np.random.default_rng(day.seed)
    rates = _rates(day, rng)
    weight = max(1.0, day.peak / _PACKETS)
    came = np.cumsum(rng.poisson(rates))
    upto = (came / weight).astype(int)
    packets: list[Packet] = []
    for second, count in enumerate(np.diff(upto, prepend=0).tolist()):
        for place in range(count):
            number = len(packets) % len(prompts)
            at = second + (place + rng.random()) / count
            packets.append(Packet(at, int(prompts[number]), int(answers[number]), weight))
    return packets


def _rates(day: MadeDay, rng: "np.random.Generator") -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Requests per second, by second."""
    seconds = np.arange(int(day.hours * 3600), dtype=np.float64)
    wave = (1 - np.cos(2 * math.pi * (seconds - _LOWEST) / _DAY)) / 2
    rates = day.peak * (day.trough + (1 - day.trough) * wave)
    slots = int(len(seconds) // _SLOT) + 2
    drawn = _uneven(day.unevenness, slots, rng)
    rates *= np.interp(seconds / _SLOT, np.arange(slots), drawn)
    for _ in range(rng.poisson(day.bursts * day.hours / 24)):
        begin, lasts = rng.uniform(0, day.hours * 3600), rng.uniform(120, 480)
        rates[int(begin) : int(begin + lasts)] *= 2.0
    return rates


def _uneven(variation: float, slots: int, rng: "np.random.Generator") -> list[float]:
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
