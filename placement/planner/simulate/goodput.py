"""Goodput of a layout: the highest rate of requests of which enough are within both targets, found by playing them."""

from collections.abc import Sequence

from afserve.placement.planner.simulate.phases import GoodputTargets, PhaseLayout, PhasesRun
from afserve.placement.planner.simulate.station import SimulatedRequest

_LEAST, _MOST = 1e-2, 1e5  # requests per second that are told apart from none and from any number


def holds(
    layout: PhaseLayout, asked: Sequence[SimulatedRequest], targets: GoodputTargets, least: float
) -> bool:
    """Whether at least that share of requests meets both targets: known once enough have, or too many are late."""
    run, count = PhasesRun(layout, asked), len(asked)
    met = missed = due = 0
    for number in run.play():
        now = run.now
        while due < count and now - asked[due].at > targets.ttft:
            missed += run.times[due].first - asked[due].at > targets.ttft
            due += 1
        one, times = asked[number], run.times[number]
        if targets.met(one, times):
            met += 1
            if 1 - (count - met) / count >= least:
                return True
        elif times.first - one.at <= targets.ttft:
            missed += 1
        if 1 - missed / count < least:
            return False
    return 1 - (count - met) / count >= least


def at_rate(asked: Sequence[SimulatedRequest], rate: float) -> list[SimulatedRequest]:
    """All of them, sped up or slowed so that `rate` come per second on average: so a higher rate is a harder run."""
    span = max(asked[-1].at - asked[0].at, 1e-9)
    pace = (len(asked) - 1) / span / rate
    return [SimulatedRequest((one.at - asked[0].at) * pace, one.prompt, one.answer) for one in asked]


def goodput(
    layout: PhaseLayout,
    asked: Sequence[SimulatedRequest],
    targets: GoodputTargets,
    *,
    above: float = 0.0,
    guess: float = 1.0,
    least: float = 0.9,
    within: float = 0.02,
) -> float:
    """Requests per second: the highest rate at which the share `least` meets both targets, found to `within` by steps
    of two from `guess` and by bisection. 0 where that is not more than `above`, or where it is less than `_LEAST`."""

    def held(rate: float) -> bool:
        return holds(layout, at_rate(asked, rate), targets, least)

    rate = above * (1 + within) or guess
    if held(rate):
        low, high = rate, 2 * rate
        while held(high):
            if high > _MOST:
                return high
            low, high = high, 2 * high
    else:
        if above:
            return 0.0
        low, high = rate / 2, rate
        while not held(low):
            if low < _LEAST:
                return 0.0
            low, high = low / 2, low
    while high - low > within * high:
        middle = (low + high) / 2
        if held(middle):
            low = middle
        else:
            high = middle
    return low
