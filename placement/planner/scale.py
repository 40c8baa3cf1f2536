"""Whether the answer turns on more of the same hardware: attention devices share an expert side, and a small pool has
too few of them to fill it.

One search more, and only where colocated is ahead on the pools as they are. Values only.
"""

from dataclasses import replace

from afserve.placement.planner.infeasible import describe
from afserve.placement.planner.planner import Answer, Question, answer
from afserve.placement.planner.search import ANY, Pool
from afserve.placement.planner.sensitivity import merit, probability

MORE, LIKELY = 2, 0.6


def on_more_devices(question: Question, found: Answer) -> str:
    """A sentence where AFD is likely ahead on twice the pools and not on these; "" where it is not, or the layout is
    given."""
    afd, colocated = found.best("afd"), found.best("colocated")
    given = replace(question.layout, running=0, tensor_parallel=0) != ANY
    if afd is None or colocated is None or given or merit(question, afd) > merit(question, colocated):
        return ""
    pools = tuple(Pool(pool.chip, MORE * pool.count) for pool in question.pools)
    larger = replace(question, pools=pools)
    more = answer(larger)
    afd, colocated = more.best("afd"), more.best("colocated")
    if afd is None or colocated is None or probability(larger, afd, colocated) < LIKELY:
        return ""
    gain, chance = merit(larger, afd) / merit(larger, colocated) - 1, probability(larger, afd, colocated)
    return (
        f"On twice the devices it turns: {describe(afd)} is {gain:.0%} ahead of colocated, better with probability "
        f"{chance:.2f}."
    )
