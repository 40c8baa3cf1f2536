"""What a plan's charts have as their height: the throughput per what the objective saves, and per device."""

from collections.abc import Callable
from dataclasses import dataclass

from afserve.placement.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Measure:
    """label: the words at an axis, with the unit. of: a plan's height, more is better."""

    label: str
    of: Callable[[Plan], float]


PER_DEVICE = Measure("tokens per second and device", lambda plan: plan.tok_s_per_device)
_OTHERS = {
    "dollar": Measure("million tokens per dollar", lambda plan: 1 / plan.usd_per_mtok),
    "watt": Measure("tokens per joule", lambda plan: plan.tokens_per_joule),
}


def optimised(objective: str) -> Measure:
    """Tokens per second and device where the objective counts nothing per token."""
    return _OTHERS.get(objective, PER_DEVICE)


def measures(objective: str) -> tuple[Measure, ...]:
    """What was optimised first; then, where that is another one, tokens per second and device."""
    first = optimised(objective)
    return (first,) if first is PER_DEVICE else (first, PER_DEVICE)
