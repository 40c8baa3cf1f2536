"""What the chosen plan hangs on: each assumption at a low and at a high value, in tokens per second per device.

The layout stays and its batch is chosen anew inside the targets, twice for each assumption: at most fourteen
evaluations of one layout, and no search. Values in, values out.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from afserve.placement.planner.interval import WITHIN_80
from afserve.placement.planner.perf.curve import Curve, CurveSet
from afserve.placement.planner.perf.workload import LONGEST, Workload, fixed_context, from_samples
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question
from afserve.placement.planner.same_layout import Conditions, conditions_of, targets_of, tokens_per_second

TIMES = "times"
SKEW_STEP, SKEW_MOST = 0.4, 4.0
_KERNELS = ("core", "gemm", "experts", "attention_layer", "prefill")
_EXCHANGES = ("exchange", "answer", "network", "fast_link")


@dataclass(frozen=True, slots=True)
class Assumption:
    """One figure in `unit`: as it was planned with, and the conditions at either end. `why` says how far they are."""

    name: str
    unit: str
    planned: float
    low: tuple[float, Conditions]
    high: tuple[float, Conditions]
    why: str


@dataclass(frozen=True, slots=True)
class Swing:
    """Tokens per second per device at both ends of an assumption; None where no batch meets the targets there. names:
    of what is no number, at the low end, as planned and at the high end."""

    name: str
    unit: str
    low: float
    planned: float
    high: float
    at_low: float | None
    at_high: float | None
    why: str
    names: tuple[str, str, str] | None = None

    def effect(self, planned: float) -> float:
        """Between the largest and the smallest of the three rates; missing the targets counts as no tokens at all."""
        rates = (self.at_low or 0.0, planned, self.at_high or 0.0)
        return max(rates) - min(rates)


def tornado(question: Question, plan: Plan) -> tuple[Swing, ...]:
    """The largest effect first."""
    targets = targets_of(question, plan)

    def rate(given: Conditions) -> float | None:
        found = tokens_per_second(question, plan, targets, given)
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
        for one in assumptions(conditions_of(question, plan))
    ]
    swings += _engines(question, plan, rate)
    return tuple(sorted(swings, key=lambda swing: (-swing.effect(plan.tok_s_per_device), swing.name)))


def _engines(question: Question, plan: Plan, rate: Callable[[Conditions], float | None]) -> Iterator[Swing]:
    """The same layout under each other engine of its kind; at the ends stand the slowest and the fastest."""
    given = conditions_of(question, plan)
    rates = {
        engine.name: rate(replace(given, setting=given.setting.served_by(engine)))
        for kind, engine in question.others
        if kind == plan.kind and engine.name != plan.engine
    }
    if rates:
        rates[plan.engine] = plan.tok_s_per_device
        slow, fast = (pick(rates, key=lambda name: rates[name] or 0.0) for pick in (min, max))
        why = "the same layout under each engine whose rows bear on it"
        yield Swing("engine", "name", -1, 0, 1, rates[slow], rates[fast], why, (slow, plan.engine, fast))


def assumptions(given: Conditions) -> Iterator[Assumption]:
    """Those that this question has: no skew where experts were counted, no acceptance without drafts."""
    sigma = max(given.setting.curves.spread_on(chip.rows_name) for chip in (given.attention, given.experts))
    factor = math.exp(WITHIN_80 * sigma)
    spread = f"80 % of the kernels' spread here, +-{sigma:.0%}"
    for name, low, high, vary, why in (
        (
            "link and network bandwidth",
            0.5,
            2.0,
            _with_links,
            "half under contention; twice: one generation on",
        ),
        ("memory bandwidth", 0.8, 1.25, _with_memory, "a fifth less, and as much more, than the data sheets"),
        (
            "exchange latency",
            0.5,
            2.0,
            _with_latency,
            "half and twice the latency of links, send and receive",
        ),
        ("kernel efficiency", 1 / factor, factor, _with_kernels, spread),
    ):
        yield Assumption(name, TIMES, 1.0, (low, vary(given, low)), (high, vary(given, high)), why)
    setting = given.setting
    if not setting.routing.counts:
        yield _skew(given)
    yield _context(given)
    if setting.drafts.tokens:
        yield _acceptance(given)


def _with_links(given: Conditions, factor: float) -> Conditions:
    return given.with_scaled_chips(("link", "network", "reduce"), factor)


def _with_memory(given: Conditions, factor: float) -> Conditions:
    return given.with_scaled_chips(("bandwidth",), factor)


def _with_latency(given: Conditions, factor: float) -> Conditions:
    """The wires' latency, and the kernels that send and receive."""
    varied = given.with_scaled_chips(("link_latency", "network_latency"), factor)
    return _with_curves(varied, _EXCHANGES, lambda curve: replace(curve, launch=curve.launch * factor))


def _with_kernels(given: Conditions, factor: float) -> Conditions:
    """Every kernel of both halves `factor` times as fast."""

    def faster(curve: Curve) -> Curve:
        return replace(
            curve,
            launch=curve.launch / factor,
            per_group=curve.per_group / factor,
            scale=curve.scale / factor,
        )

    return _with_curves(given, _KERNELS, faster)


def _with_curves(
    given: Conditions, operations: tuple[str, ...], vary: Callable[[Curve], Curve]
) -> Conditions:
    def varied(curves: CurveSet) -> CurveSet:
        found = {
            name: vary(curve) if name.split(".", maxsplit=1)[0] in operations else curve
            for name, curve in curves.curves.items()
        }
        return CurveSet(curves.name, found, curves.model_spread, curves.checked, curves.most)

    setting = given.setting
    reached = None if setting.reached is None else varied(setting.reached)
    return replace(given, setting=replace(setting, curves=varied(setting.curves), reached=reached))


def _skew(given: Conditions) -> Assumption:
    routing = given.setting.routing

    def at(zipf: float) -> Conditions:
        return replace(given, setting=replace(given.setting, routing=replace(routing, zipf=zipf)))

    low, high = max(routing.zipf - SKEW_STEP, 0.0), min(routing.zipf + SKEW_STEP, SKEW_MOST)
    return Assumption(
        "expert skew",
        "Zipf exponent",
        routing.zipf,
        (low, at(low)),
        (high, at(high)),
        f"{SKEW_STEP:g} to either side: no workload's routing is known before it was recorded",
    )


def _context(given: Conditions) -> Assumption:
    work = given.setting.workload

    def at(longer: Workload) -> tuple[float, Conditions]:
        return longer.context_mean, replace(given, setting=replace(given.setting, workload=longer))

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


def _acceptance(given: Conditions) -> Assumption:
    drafts = given.setting.drafts

    def at(deviations: float) -> tuple[float, Conditions]:
        length = drafts.further(deviations)
        varied = replace(given.setting, drafts=replace(drafts, length=length))
        return length, replace(given, setting=varied)

    return Assumption(
        "acceptance of drafts",
        "tokens a step",
        drafts.length,
        at(-WITHIN_80),
        at(WITHIN_80),
        f"80 % of what is known of it: {drafts.source or 'typed'}",
    )
