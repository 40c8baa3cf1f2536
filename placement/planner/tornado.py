"""What the chosen plan hangs on: each assumption at a low and at a high value, in tokens per second per device.

The layout stays and its batch is chosen anew inside the targets, twice for each assumption: at most fourteen
evaluations of one layout, and no search. Values in, values out.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from afserve.placement.planner.hardware import Hardware
from afserve.placement.planner.perf_curve import Curve, CurveSet
from afserve.placement.planner.plan import WITHIN_80, Plan
from afserve.placement.planner.planner import Question
from afserve.placement.planner.same_layout import Case, case_of, targets_of, tokens_per_second
from afserve.placement.planner.workload import LONGEST, Workload, fixed_context, from_samples

TIMES = "times"
SKEW_STEP, SKEW_MOST, ACCEPTANCE_STEP = 0.4, 4.0, 0.1
_KERNELS = ("core", "gemm", "experts", "attention_layer", "prefill")
_EXCHANGES = ("exchange", "answer", "network", "fast_link")


@dataclass(frozen=True, slots=True)
class Assumption:
    """One figure in `unit`: as it was planned with, and the case at either end. why: how far the ends are, and why."""

    name: str
    unit: str
    planned: float
    low: tuple[float, Case]
    high: tuple[float, Case]
    why: str


@dataclass(frozen=True, slots=True)
class Swing:
    """Tokens per second per device at both ends of an assumption; None where no batch meets the targets there."""

    name: str
    unit: str
    low: float
    planned: float
    high: float
    at_low: float | None
    at_high: float | None
    why: str

    def effect(self, planned: float) -> float:
        """Between the largest and the smallest of the three rates; missing the targets counts as no tokens at all."""
        rates = (self.at_low or 0.0, planned, self.at_high or 0.0)
        return max(rates) - min(rates)


def tornado(question: Question, plan: Plan) -> tuple[Swing, ...]:
    """The largest effect first."""
    targets = targets_of(question, plan)

    def rate(case: Case) -> float | None:
        found = tokens_per_second(question, plan, targets, case)
        return None if found is None or not math.isfinite(found) else found / plan.devices

    swings = [
        Swing(
            one.name,
            one.unit,
            one.low[0],
            one.planned,
            one.high[0],
            rate(one.low[1]),
            rate(one.high[1]),
            one.why,
        )
        for one in assumptions(case_of(question, plan))
    ]
    return tuple(sorted(swings, key=lambda swing: (-swing.effect(plan.tok_s_per_device), swing.name)))


def assumptions(case: Case) -> Iterator[Assumption]:
    """Those that this question has: no skew where experts were counted, no acceptance without drafts."""
    yield _times(
        case,
        "link and network bandwidth",
        0.5,
        2.0,
        _with_links,
        "half under contention; twice: one generation on",
    )
    yield _times(
        case,
        "memory bandwidth",
        0.8,
        1.25,
        _with_memory,
        "a fifth less, and as much more, than the data sheets",
    )
    yield _times(
        case,
        "exchange latency",
        0.5,
        2.0,
        _with_latency,
        "half and twice the latency of links, send and receive",
    )
    sigma = max(case.setting.curves.spread_on(chip.name) for chip in (case.attention, case.experts))
    factor = math.exp(WITHIN_80 * sigma)
    yield _times(
        case,
        "kernel efficiency",
        1 / factor,
        factor,
        _with_kernels,
        f"80 % of the kernels' spread here, +-{sigma:.0%}",
    )
    setting = case.setting
    if not setting.routing.counts:
        yield _skew(case)
    yield _context(case)
    if setting.draft_tokens:
        yield _acceptance(case)


def _times(
    case: Case, name: str, low: float, high: float, vary: Callable[[Case, float], Case], why: str
) -> Assumption:
    return Assumption(name, TIMES, 1.0, (low, vary(case, low)), (high, vary(case, high)), why)


def _with_chips(case: Case, vary: Callable[[Hardware], Hardware]) -> Case:
    return replace(case, attention=vary(case.attention), experts=vary(case.experts))


def _with_links(case: Case, factor: float) -> Case:
    return _with_chips(
        case, lambda chip: replace(chip, link=chip.link * factor, network=chip.network * factor)
    )


def _with_memory(case: Case, factor: float) -> Case:
    return _with_chips(case, lambda chip: replace(chip, bandwidth=chip.bandwidth * factor))


def _with_latency(case: Case, factor: float) -> Case:
    """The wires' latency, and the kernels that send and receive."""
    varied = _with_chips(
        case,
        lambda chip: replace(
            chip,
            link_latency=chip.link_latency * factor,
            network_latency=chip.network_latency * factor,
        ),
    )
    return _with_curves(varied, _EXCHANGES, lambda curve: replace(curve, launch=curve.launch * factor))


def _with_kernels(case: Case, factor: float) -> Case:
    """Every kernel of both halves `factor` times as fast."""

    def faster(curve: Curve) -> Curve:
        return replace(
            curve,
            launch=curve.launch / factor,
            per_group=curve.per_group / factor,
            scale=curve.scale / factor,
        )

    return _with_curves(case, _KERNELS, faster)


def _with_curves(case: Case, operations: tuple[str, ...], vary: Callable[[Curve], Curve]) -> Case:
    def varied(curves: CurveSet) -> CurveSet:
        found = {
            name: vary(curve) if name.split(".", maxsplit=1)[0] in operations else curve
            for name, curve in curves.curves.items()
        }
        return CurveSet(curves.name, found, curves.model_spread, curves.checked)

    setting = case.setting
    reached = None if setting.reached is None else varied(setting.reached)
    return replace(case, setting=replace(setting, curves=varied(setting.curves), reached=reached))


def _skew(case: Case) -> Assumption:
    routing = case.setting.routing

    def at(zipf: float) -> Case:
        return replace(case, setting=replace(case.setting, routing=replace(routing, zipf=zipf)))

    low, high = max(routing.zipf - SKEW_STEP, 0.0), min(routing.zipf + SKEW_STEP, SKEW_MOST)
    return Assumption(
        "expert skew",
        "Zipf exponent",
        routing.zipf,
        (low, at(low)),
        (high, at(high)),
        f"{SKEW_STEP:g} to either side: no workload's routing is known before it was recorded",
    )


def _context(case: Case) -> Assumption:
    work = case.setting.workload

    def at(longer: Workload) -> tuple[float, Case]:
        return longer.context_mean, replace(case, setting=replace(case.setting, workload=longer))

    return Assumption(
        "context",
        "tokens",
        work.context_mean,
        at(_longer(work, 0.5)),
        at(_longer(work, 2.0)),
        "prompts of half and of twice the length",
    )


def _longer(work: Workload, factor: float) -> Workload:
    prompt = np.clip(work.prompt * factor, 1.0, LONGEST)
    if work.context_deviation == 0 and len(work.prompt) == 1:
        return fixed_context(float(prompt[0]))
    return from_samples(work.name, prompt, work.answer, work.arrival, work.decode_only)


def _acceptance(case: Case) -> Assumption:
    planned = case.setting.acceptance

    def at(share: float) -> Case:
        return replace(case, setting=replace(case.setting, acceptance=share))

    low, high = max(planned - ACCEPTANCE_STEP, 0.0), min(planned + ACCEPTANCE_STEP, 1.0)
    return Assumption(
        "acceptance of drafts",
        "share",
        planned,
        (low, at(low)),
        (high, at(high)),
        f"{ACCEPTANCE_STEP:g} to either side: it differs between kinds of text",
    )
