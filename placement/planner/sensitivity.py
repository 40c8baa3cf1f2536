"""What 10 % more of each resource would bring: the best plan's layout is computed again with one figure scaled.

The words of the verdict on disaggregation are here too, from the stage times of both sides.
"""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from afserve.placement.planner.infeasible import describe, why_none
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question, RankedPlans
from afserve.placement.planner.same_layout import conditions_of, targets_of, tokens_per_second

MORE = 1.1  # times each resource
_MOST_DOUBLINGS = 20  # of devices that a row can have been measured on
_SAME = 5e-4  # of a gain
CLOSE = 0.1  # of a probability to one half: nobody knows which is better
_ATTENTION, _EXPERTS = ("attention",), ("experts",)
_RESOURCES = {
    "attention bandwidth": (_ATTENTION, ("bandwidth",)),
    "attention compute": (_ATTENTION, ("flops_bf16", "flops_fp8", "flops_fp4")),
    "attention memory": (_ATTENTION, ("memory",)),
    "expert bandwidth": (_EXPERTS, ("bandwidth",)),
    "expert compute": (_EXPERTS, ("flops_bf16", "flops_fp8", "flops_fp4")),
    "link": ((*_ATTENTION, *_EXPERTS), ("link", "network", "reduce")),
}


def sensitivity(question: Question, plan: Plan) -> dict[str, float | None]:
    """Relative throughput change of the same layout when one resource grows by a tenth; the batch is chosen anew, but
    for the lowest latency, where it stays and the change is that of one request's rate. None where no batch fits."""
    targets, base = targets_of(question, plan), conditions_of(question, plan)
    before = tokens_per_second(question, plan, targets, base)
    changes: dict[str, float | None] = {}
    for name, (sides, fields) in _RESOURCES.items():
        if plan.kind == "colocated" and sides == _EXPERTS:
            continue
        label = name.replace("attention ", "") if plan.kind == "colocated" else name
        given = base.with_scaled_chips(fields, MORE, sides)
        changes[label] = _change(before, tokens_per_second(question, plan, targets, given))
    if np.isfinite(question.targets.tpot):
        looser = replace(question.targets, tpot=question.targets.tpot * MORE)
        changes["TPOT target"] = _change(before, tokens_per_second(question, plan, looser, base))
    return changes


def _change(before: float | None, after: float | None) -> float | None:
    return after / before - 1 if before and after else None


def verdict(question: Question, found: RankedPlans, chance: float | None = None, among: str = "") -> str:
    """Disaggregate or not, by how much, and why; how sure that is, and what would make it surer. chance: over several
    engines, that AFD is better; `among` says where they differ."""
    colocated, afd = found.best("colocated"), found.best("afd")
    if afd is None or colocated is None:
        return " ".join(filter(None, (_conclusion(question, found, 0.5), among)))
    sure = probability(question, afd, colocated) if chance is None else chance
    said = _conclusion(question, found, sure)
    return " ".join(filter(None, (said, among, chance_words(question, afd, colocated, sure))))


def _conclusion(question: Question, found: RankedPlans, chance: float) -> str:
    colocated, afd = found.best("colocated"), found.best("afd")
    if afd is None and colocated is None:
        return "Nothing meets the targets in these pools."
    if len(question.kinds) == 1:
        return f"Only {question.kinds[0].replace('afd', 'AFD')} plans were asked for: there is nothing to compare."
    if colocated is None and afd is not None:
        return f"Disaggregate: {why_none(question, 'colocated')}; AFD runs on {_words(afd)}."
    if afd is None and colocated is not None:
        return f"Do not disaggregate: {why_none(question, 'afd')}; colocated runs on {_words(colocated)}."
    assert afd is not None and colocated is not None
    gain = merit(question, afd) / merit(question, colocated) - 1
    than = _than(question, afd, colocated, gain)
    if abs(chance - 0.5) < CLOSE:
        return f"Undecided: {than}, which is within what is not known of both."
    if abs(gain) < _SAME:
        return f"Undecided: {than}."
    if (chance > 0.5) != (gain > 0):
        side = "Disaggregate" if chance > 0.5 else "Do not disaggregate"
        return f"{side}, although {than}: other engines outweigh it."
    if gain > 0:
        return f"Disaggregate: {than}. {_why_wins(afd, colocated)}"
    return f"Do not disaggregate: {than}. {_why_loses(afd)}"


def _than(question: Question, afd: Plan, colocated: Plan, gain: float) -> str:
    if question.objective == "count":
        return _fewer(afd, colocated)
    unit = UNITS[question.objective]
    sides = ""
    if afd.engine != colocated.engine:
        sides = f" ({afd.engine} against {colocated.engine})"
    if abs(gain) < _SAME:
        return f"AFD and colocated have the same {unit}{sides}"
    much = f"{abs(gain):.1%}" if abs(gain) < CLOSE else f"{abs(gain):.0%}"
    return f"AFD has {much} {'higher' if gain > 0 else 'lower'} {unit} than colocated{sides}"


def probability(question: Question, afd: Plan, colocated: Plan) -> float:
    """That AFD is the better one: both errors are taken as normal, and as having nothing to do with each other, but for
    the acceptance of drafts, which is that of the text."""
    gain = math.log(merit(question, afd) / merit(question, colocated))
    accepted = afd.drafts.deviation - colocated.drafts.deviation
    error = math.hypot(afd.own_error, colocated.own_error, accepted)
    return NormalDist(0.0, max(error, 1e-6)).cdf(gain)


def chance_words(question: Question, afd: Plan, colocated: Plan, chance: float) -> str:
    """The probability, and whose measurement would move it most."""
    words = f"AFD is better with probability {chance:.2f}."
    deciding = decider(question, afd, colocated, chance)
    return f"{words} What would decide it: {deciding}" if deciding else words


def decider(question: Question, afd: Plan, colocated: Plan, chance: float) -> str:
    """The measurement that would decide between the two; "" where the answer is sure enough without one."""
    if not 0.1 < chance < 0.9:
        return ""
    least = afd if afd.error >= colocated.error else colocated
    engine = f" with {least.engine}" if least.engine else ""
    return (
        f"measure {describe(least)}{engine} at {least.requests:,} request{'s' * (least.requests != 1)}, the less "
        f"certain of the two (+-{least.error:.0%}).{_measured_elsewhere(question, least)}"
    )


def _measured_elsewhere(question: Question, plan: Plan) -> str:
    """Where the engine's rows are, if none has this plan's hardware, or as few or as many devices."""
    engine = dict(question.engines).get(plan.kind)
    if engine is None or not engine.measured:
        return ""
    counts = np.rint(2.0 ** np.clip(engine.rows.devices, 0, _MOST_DOUBLINGS)).astype(int)
    chips = [like.chip for like in engine.rows.like]
    if plan.attention.hardware in chips and counts.min() <= plan.devices <= counts.max():
        return ""
    few, many = counts.min(), counts.max()
    devices = f"{few}" if few == many else f"{few} to {many}"
    return f" {engine.name} was measured on {devices} {' or '.join(sorted(set(chips)))}."


UNITS = {
    "dollar": "tokens per dollar",
    "device": "tokens per device",
    "watt": "tokens per joule",
    "latency": "token rate per request",
    "speed": "tokens per second",
}


def _fewer(afd: Plan, colocated: Plan) -> str:
    few, many = afd.all_devices, colocated.all_devices
    if few == many:
        return f"AFD and colocated need the same number of devices for this rate, {few:,}"
    return f"AFD needs {few:,} devices for this rate, colocated {many:,}"


def merit(question: Question, plan: Plan) -> float:
    """Higher is better. For a rate it counts what all instances take."""
    if question.tokens_per_second and question.objective in ("dollar", "device", "watt", "count"):
        taken = {"dollar": plan.usd_per_hour, "watt": plan.watts}.get(question.objective, plan.devices)
        return 1 / (plan.instances * taken)
    values = {
        "dollar": 1 / plan.usd_per_mtok,
        "device": plan.tok_s_per_device,
        "watt": plan.tokens_per_joule,
        "latency": 1 / plan.tpot,
        "speed": plan.tok_s,
        "count": 1 / plan.devices,
    }
    return values[question.objective]


def _why_wins(afd: Plan, colocated: Plan) -> str:
    if afd.attention.hardware != afd.experts.hardware:
        return f"Attention suits {afd.attention.hardware}, experts suit {afd.experts.hardware}."
    if colocated.limited_by == "memory":
        return (
            f"Colocated runs out of memory at {colocated.batch * colocated.micro_batches} requests per rank; without "
            f"expert weights attention holds {afd.batch * afd.micro_batches}."
        )
    return "Shared experts see larger batches, so their weights are read less often per token."


def _why_loses(afd: Plan) -> str:
    idle = afd.bubbles()
    stages = afd.stages
    moved = (stages.dispatch + stages.combine) / stages.round_trip
    if afd.bound_by == "link" or moved > 0.5:
        return (
            f"Transfers are {moved:.0%} of a layer's round trip: the link is too slow for this model's rows."
        )
    if max(idle["attention"], idle["experts"]) > 0.15:
        side = "attention" if idle["attention"] > idle["experts"] else "experts"
        return f"The {side} side would idle {idle[side]:.0%} of the time at the best ratio."
    cause = "Memory" if afd.limited_by == "memory" else "The SLO"
    return (
        f"{cause} leaves each of {afd.micro_batches} micro-batches {afd.batch} requests per rank, so every weight is "
        "read for fewer rows than in one colocated batch."
    )


def _words(plan: Plan) -> str:
    if plan.kind == "colocated":
        return f"{plan.devices} {plan.attention.hardware}"
    return (
        f"{plan.attention.devices} {plan.attention.hardware} : {plan.experts.devices} {plan.experts.hardware}"
    )
