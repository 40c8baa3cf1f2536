"""From how many of the same devices AFD would be ahead: attention devices share an expert side, and a small pool has
too few of them to fill it.

A few searches more, and only where colocated is ahead on the pools as they are. Values only.
"""

from dataclasses import dataclass, replace

from afserve.placement.planner.infeasible import describe
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question, RankedPlans, answer
from afserve.placement.planner.search import ANY, DevicePool
from afserve.placement.planner.sensitivity import merit, probability

LIKELY = 0.6
_TIMES, _MOST = (2, 4, 8), 512
"""The pools are tried at so many times their size, up to so many devices; then sizes between are halved."""


@dataclass(frozen=True, slots=True)
class _Size:
    """The best plans of either kind on larger pools."""

    pools: tuple[DevicePool, ...]
    afd: Plan
    gain: float
    chance: float

    def __str__(self) -> str:
        named = " and ".join(f"{pool.count} {pool.chip.name}" for pool in self.pools)
        return f"with {named}, {describe(self.afd)} is {self.gain:.0%} ahead, better with probability {self.chance:.2f}"


def on_more_devices(question: Question, found: RankedPlans) -> str:
    """A sentence that names the least pools on which AFD is likely ahead, where it is not on these; "" where that is
    none of those tried, or the layout is given."""
    afd, colocated = found.best("afd"), found.best("colocated")
    given = replace(question.layout, running=0, tensor_parallel=0) != ANY
    if afd is None or colocated is None or given or merit(question, afd) > merit(question, colocated):
        return ""
    smaller = question.pools
    for times in _TIMES:
        pools = tuple(DevicePool(pool.chip, times * pool.count) for pool in question.pools)
        if sum(pool.count for pool in pools) > _MOST:
            return ""
        ahead = _ahead(question, pools)
        if ahead is not None:
            least = _least(question, smaller, ahead)
            more = "" if least.pools == ahead.pools else f"; {ahead}"
            return f"On more devices it turns: {least}{more}."
        smaller = pools
    return ""


def _least(question: Question, low: tuple[DevicePool, ...], high: _Size) -> _Size:
    """The fewest whole nodes between two sizes with which AFD is likely ahead."""
    while True:
        pools = tuple(
            DevicePool(few.chip, _between(few, many)) for few, many in zip(low, high.pools, strict=True)
        )
        if pools in (low, high.pools):
            return high
        found = _ahead(question, pools)
        low, high = (pools, high) if found is None else (low, found)


def _between(few: DevicePool, many: DevicePool) -> int:
    """In whole nodes, where the pool has more than one."""
    node = few.chip.devices if few.count > few.chip.devices else 1
    return few.count + (many.count - few.count) // (2 * node) * node


def _ahead(question: Question, pools: tuple[DevicePool, ...]) -> _Size | None:
    """None where AFD is not likely ahead on these pools."""
    larger = replace(question, pools=pools)
    found = answer(larger)
    afd, colocated = found.best("afd"), found.best("colocated")
    if afd is None or colocated is None or probability(larger, afd, colocated) < LIKELY:
        return None
    gain = merit(larger, afd) / merit(larger, colocated) - 1
    return _Size(pools, afd, gain, probability(larger, afd, colocated))
