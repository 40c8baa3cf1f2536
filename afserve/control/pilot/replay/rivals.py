"""What a pilot is compared with: an oracle, the best fixed sizes, and an autoscaler of whole replicas.

The oracle knows the future and changes for nothing: in each minute it has the smallest sizes for that minute's busiest
part. The autoscaler is as Kubernetes' HorizontalPodAutoscaler has it: replicas of one ratio, as many as bring requests
in the system per replica to a target, more at once, fewer after five minutes in which fewer were enough; a replica
serves minutes after it was asked for.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from afserve.control.pilot.observed import MeanLengths, Observed, PoolLoad
from afserve.control.pilot.plan import Planner
from afserve.control.pilot.replay.counts import Packet
from afserve.control.pilot.replay.run import PlayedDay, World, play
from afserve.control.pilot.sizes import Demand, PoolSizes

_MINUTE, _PART = 60.0, 10.0  # seconds
_STABLE = 300.0  # seconds in which fewer replicas must have been enough
_TOLERANCE = 0.1  # of the target that is left alone, as Kubernetes has it
MARGINS = (1.0, 1.1, 1.25, 1.5)


def demand_of(packets: Iterable[Packet], seconds: float) -> Demand | None:
    """Of what comes within so long; None for nothing."""
    rows = [
        (one.weight, one.prompt * one.weight, one.prompt**2 * one.weight, one.answer * one.weight)
        for one in packets
    ]
    if not rows:
        return None
    came, prompts, squares, answers = map(sum, zip(*rows, strict=True))
    lengths = MeanLengths(memory=0.0)
    lengths.note_load(PoolLoad(came, prompts, squares, ended=came, answer_tokens=answers))
    return lengths.demand(came / seconds)


def oracle(world: World, packets: Sequence[Packet], planner: Planner, margin: float = 1.0) -> PlayedDay:
    """`margin`: of what comes, that it has room for."""
    plans = _plans(packets, planner, margin)

    def sizer(seen: Observed) -> PoolSizes:
        return plans[min(int((seen.at + 1e-6) // _MINUTE), len(plans) - 1)]

    return play(replace(world, start=0.0), packets, plans[0], sizer)


def _plans(packets: Sequence[Packet], planner: Planner, margin: float) -> list[PoolSizes]:
    """By minute: for the lengths of ten minutes and the busiest ten seconds."""
    times = [one.at for one in packets]
    plans: list[PoolSizes] = []
    for minute in range(int(packets[-1].at // _MINUTE) + 1):
        begin = minute * _MINUTE
        near = packets[bisect_left(times, begin - 4 * _MINUTE) : bisect_left(times, begin + 6 * _MINUTE)]
        lengths = demand_of(near, 10 * _MINUTE)
        edges = [bisect_left(times, begin + part * _PART) for part in range(int(_MINUTE / _PART) + 1)]
        most = max(sum(one.weight for one in packets[low:high]) / _PART for low, high in pairwise(edges))
        if lengths is None:
            plans.append(planner.limits.least)
        else:
            plans.append(planner.best_effort(replace(lengths, rate=max(most, 0.01) * margin)))
    return plans


def best_oracle(world: World, packets: Sequence[Packet], planner: Planner) -> PlayedDay:
    """With the smallest margin that serves nearly as many as the largest one does."""
    most = oracle(world, packets, planner, MARGINS[-1])
    for margin in MARGINS[:-1]:
        found = oracle(world, packets, planner, margin)
        if found.met >= 0.995 * most.met:
            return found
    return most


def fixed(world: World, packets: Sequence[Packet], planner: Planner, met: float) -> PlayedDay:
    """The fewest devices that never change and serve at least `met` in time, of those that are planned for some rate;
    what is most where none does."""
    whole = demand_of(packets, packets[-1].at)
    assert whole is not None, "somebody came"
    low, high = 0, 15
    rates = [whole.rate * 1.1**power for power in range(high + 1)]

    def tried(number: int) -> PlayedDay:
        sizes = planner.best_effort(replace(whole, rate=rates[number]))
        return play(world, packets, sizes, lambda seen: None)

    best = tried(high)
    while low < high:
        middle = (low + high) // 2
        found = tried(middle)
        if found.met >= met:
            best, high = found, middle
        else:
            low = middle + 1
    return best


def replicas(
    world: World,
    packets: Sequence[Packet],
    unit: PoolSizes,
    per_replica: float,
    counts: tuple[int, int],
    start: float,
) -> PlayedDay:
    """`unit` is one replica, which takes `start` seconds; `per_replica` requests in it are the target. `counts` of
    replicas: at first, and at most."""
    recent: deque[tuple[float, int]] = deque()
    lengths = MeanLengths()
    before: list[Observed] = []

    def sizer(seen: Observed) -> PoolSizes | None:
        if before:
            lengths.note_load(seen.since(before[0]).load)
        before[:] = [seen]
        have = seen.sizes.experts // unit.experts
        waiting = seen.queued_tokens / lengths.prompt if lengths.prompt else 0.0
        share = (seen.running + waiting) / per_replica / have
        wanted = have if abs(share - 1) <= _TOLERANCE else math.ceil(share * have)
        recent.append((seen.at, max(1, min(wanted, counts[1]))))
        while recent[0][0] < seen.at - _STABLE:
            recent.popleft()
        count = max(one for _, one in recent)
        return PoolSizes(*(count * each for each in unit)) if count != have else None

    first = PoolSizes(*(counts[0] * each for each in unit))
    return play(replace(world, start=start), packets, first, sizer)
