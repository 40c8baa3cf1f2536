"""A pilot on arrivals, and beside it an oracle, the best fixed sizes and an autoscaler of whole replicas."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from afserve.control.pilot.classes import wanted_of
from afserve.control.pilot.plan import Planner
from afserve.control.pilot.policy import PilotRules, Policy
from afserve.control.pilot.replay.counts import Packet
from afserve.control.pilot.replay.rivals import best_oracle, demand_of, fixed, replicas
from afserve.control.pilot.replay.run import PlayedDay, World, play
from afserve.control.pilot.replay.tabled import TabledModel
from afserve.control.pilot.sizes import Demand, Limits, PoolSizes, TargetTimes

_OF_ORACLE = 0.99  # of its attainment, that fixed sizes have to reach
_REPLICAS = 4  # at the busiest time, of which one is the autoscaler's unit; there may be twice as many
_FILLED = 0.7  # of what a replica can hold inside the targets, at which the autoscaler keeps it
SIZERS = ("pilot", "oracle", "fixed", "replicas")
_BEGINNING = 600.0  # seconds whose arrivals the first sizes are for


@dataclass(frozen=True, slots=True)
class Rivals:
    """Whom no policy changes. `first` sizes are those for the first ten minutes; `unit` is one replica."""

    oracle: PlayedDay
    fixed: PlayedDay
    replicas: PlayedDay
    unit: PoolSizes
    first: PoolSizes


@dataclass(frozen=True, slots=True)
class Comparison:
    """`held`: how many of the pilot's `judged` intervals held what was measured, of both times."""

    pilot: PlayedDay
    rivals: Rivals
    judged: int
    held: int

    @property
    def rows(self) -> tuple[tuple[str, PlayedDay], ...]:
        return ("pilot", self.pilot), *((name, getattr(self.rivals, name)) for name in SIZERS[1:])


def compare(
    world: World, packets: Sequence[Packet], limits: Limits, rules: PilotRules, rivals: Rivals
) -> Comparison:
    """The pilot begins with sizes for the first ten minutes, and does not know which classes come."""
    aims = [one for one in world.classes if one.name]
    policy = Policy(Planner(TabledModel(world.stages), world.wanted, limits), rules, aims)
    return Comparison(play(world, packets, rivals.first, policy.sizes), rivals, *policy.judge.intervals)


def rivals_on(world: World, packets: Sequence[Packet], limits: Limits, replica_start: float) -> Rivals:
    """Raises ValueError where nothing arrives, or all at once."""
    if not packets or packets[-1].at <= 0:
        raise ValueError("nothing arrives, or all at once")
    planner = Planner(TabledModel(world.stages), _known_wanted(world, packets), limits)
    begun = demand_of([one for one in packets if one.at <= _BEGINNING], min(_BEGINNING, packets[-1].at))
    if begun is None:
        raise ValueError("nothing arrives within the first ten minutes")
    first = planner.best_effort(begun.times(1.2))
    knowing = best_oracle(world, packets, planner)
    still = fixed(world, packets, planner, _OF_ORACLE * knowing.met)
    unit, per_replica, rate = _unit(planner, packets)
    count = max(1, ceil(1.2 * begun.rate / rate))
    scaled = replicas(world, packets, unit, per_replica, (count, 2 * _REPLICAS), replica_start)
    return Rivals(knowing, still, scaled, unit, first)


def _known_wanted(world: World, packets: Sequence[Packet]) -> TargetTimes:
    """By the classes that will come."""
    if not any(one.name for one in world.classes):
        return world.wanted
    came: defaultdict[int, float] = defaultdict(float)
    for one in packets:
        came[one.kind] += one.weight
    return wanted_of(world.wanted, [(count, world.classes[kind]) for kind, count in came.items()])


def _unit(planner: Planner, packets: Sequence[Packet]) -> tuple[PoolSizes, float, float]:
    """(one replica, requests in it at which it is kept, requests per second that it serves)."""
    whole = demand_of(packets, packets[-1].at)
    assert whole is not None, "somebody came"
    part = replace(whole, rate=busiest(packets) / _REPLICAS)
    unit = planner.best_effort(part)
    found = planner.expect(unit, part, planner.wanted)
    resident = max(1.0, part.rate * (found.tpot * part.answer + min(found.ttft, 60.0)))  # read or decoded
    return unit, _FILLED * resident, part.rate


def busiest(packets: Sequence[Packet], seconds: float = 600.0) -> float:
    """Requests per second in the busiest so many seconds."""
    counts: dict[int, float] = {}
    for one in packets:
        counts[int(one.at // seconds)] = counts.get(int(one.at // seconds), 0.0) + one.weight
    return max(counts.values()) / seconds


def most_served(planner: Planner, demand: Demand) -> float:
    """Requests per second, alike, that the largest sizes inside the limits serve; 0 where there are none."""
    low, high = 0.0, 1.0
    while planner.smallest(replace(demand, rate=high)) is not None and high < 1e6:
        low, high = high, 2 * high
    for _ in range(6):
        middle = (low + high) / 2
        if planner.smallest(replace(demand, rate=middle)) is not None:
            low = middle
        else:
            high = middle
    return low
