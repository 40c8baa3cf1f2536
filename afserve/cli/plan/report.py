"""What `afserve plan --report FILE` says: the answer of `--json`, with the question as it was typed, the Pareto front,
what the plan hangs on and what is assumed. `report_page.py` draws it; here are the values, and their JSON.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import click
from click.core import ParameterSource

from afserve.cli.plan.drafting import draft_values, draft_verdict
from afserve.cli.plan.heard import heard_rows
from afserve.cli.plan.printed import idle_words
from afserve.cli.plan.report_assumed import Assumed, assumed
from afserve.cli.plan.values import as_values
from afserve.placement.planner.draft_worth import DraftWorth
from afserve.placement.planner.infeasible import describe
from afserve.placement.planner.panel import Panel
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question, RankedPlans, pareto
from afserve.placement.planner.sensitivity import decider
from afserve.placement.planner.tornado import Swing, tornado

OUTPUTS = frozenset({"top", "as_json", "charts", "cluster", "reports"})


def typed_flags(context: click.Context) -> dict[str, str]:
    """How each flag that was given is spelled, by its parameter, in the order of the first time each was given (click
    takes them in that order); switches that are off are spelled as click does."""
    options = {option.name: option for option in context.command.params if isinstance(option, click.Option)}
    return {
        name: _spelled(options[name], value)
        for name, value in context.params.items()
        if name in options
        and name not in OUTPUTS
        and context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)
    }


def command_line(typed: Mapping[str, str]) -> str:
    return " ".join(["afserve plan", *typed.values()])


def _spelled(option: click.Option, value: object) -> str:
    if option.is_flag:
        return option.opts[0] if value or not option.secondary_opts else option.secondary_opts[0]
    values = value if isinstance(value, tuple) else (value,)
    return " ".join(f"{option.opts[0]} {shlex.quote(_word(one))}" for one in values)


def _word(value: object) -> str:
    """Whole numbers without a fraction, as people write them."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)


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


_SURE = "The two are far enough apart: no one measurement is likely to turn the answer."
_ONE_KIND = "Only one kind has a plan here: there is nothing to decide between."


@dataclass(frozen=True, slots=True)
class PlanReport:
    """chance: that AFD is better, None where only one kind has a plan. wanted: tokens per second and user that the
    targets ask for. front: by kind, fastest first, the chosen plan among them. heights: of its charts; by the first
    one the plans were chosen. heard: rows of the engines that were asked, where there were several. idle: devices on
    offer that no instance takes. answer: the values of `--json`."""

    asked: str
    question: Question
    best: Plan
    verdict: str
    chance: float | None
    decider: str
    wanted: float | None
    heights: Sequence[Measure]
    front: Mapping[str, Sequence[Plan]]
    swings: tuple[Swing, ...]
    assumed: tuple[Assumed, ...]
    heard: tuple[tuple[str, ...], ...]
    idle: str
    answer: Mapping[str, object]


def report_of(
    question: Question,
    found: RankedPlans,
    panel: Panel,
    verdict: str,
    changes: dict[str, float | None],
    typed: Mapping[str, str],
    worth: DraftWorth | None = None,
) -> PlanReport:
    """`found` has a plan. worth: of drafts, where any were asked for: whether they pay is behind the verdict. It
    searches once per point of the front, and evaluates the chosen layout for the rest."""
    best, tpot = found.plans[0], question.targets.tpot
    return PlanReport(
        asked=command_line(typed),
        question=question,
        best=best,
        verdict=" ".join([verdict, *([draft_verdict(worth)] if worth else [])]),
        chance=panel.chance,
        decider=_decider(question, found, panel),
        wanted=1 / tpot if tpot < float("inf") else None,
        heights=measures(question.objective),
        front=_front(question, best),
        swings=tornado(question, best),
        assumed=tuple(assumed(question, typed)),
        heard=tuple(heard_rows(panel)) if panel.several else (),
        idle=idle_words(question, best),
        answer=as_values(question, found, panel, verdict, changes) | draft_values(worth),
    )


def _decider(question: Question, found: RankedPlans, panel: Panel) -> str:
    afd, colocated = found.best("afd"), found.best("colocated")
    if afd is None or colocated is None or panel.chance is None:
        return _ONE_KIND
    words = decider(question, afd, colocated, panel.chance)
    return words[:1].upper() + words[1:] if words else _SURE


def _front(question: Question, best: Plan) -> dict[str, list[Plan]]:
    """By what the plan was chosen by, or tokens per device where that counts nothing per token."""
    height = optimised(question.objective)
    per_token = question if height is not PER_DEVICE else replace(question, objective="device")
    curves: dict[str, list[Plan]] = {}
    for _, found in pareto(per_token):
        curves = found
    return {
        kind: _undominated([*plans, best] if kind == best.kind else plans, height)
        for kind, plans in curves.items()
    }


def _undominated(plans: Sequence[Plan], height: Measure) -> list[Plan]:
    """Those that no other beats in both the speed of a user and the height."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.tpot, -height.of(plan))):
        if not kept or height.of(plan) > height.of(kept[-1]):
            kept.append(plan)
    return kept


def values(report: PlanReport) -> dict[str, object]:
    """JSON values, the same for the same question. Rates in tokens per second, times in ms."""
    planned = report.best.tok_s_per_device
    return {
        "question": report.asked,
        "workload": report.question.setting.workload.name,
        **report.answer,
        "what_would_decide": report.decider,
        "target_tok_s_per_user": None if report.wanted is None else round(report.wanted, 3),
        "pareto": {kind: [_point(plan) for plan in plans] for kind, plans in report.front.items()},
        "tornado": [_swing(swing, planned) for swing in report.swings],
        "assumed": [{"what": row.what, "value": row.value, "source": row.source} for row in report.assumed],
    }


def _point(plan: Plan) -> dict[str, object]:
    return {
        "plan": describe(plan),
        "micro_batches": plan.micro_batches,
        "batch": plan.batch,
        "tok_s_per_user": round(1 / plan.tpot, 3),
        "tok_s_per_device": round(plan.tok_s_per_device, 2),
        "usd_per_mtok": round(plan.usd_per_mtok, 5),
    }


def _swing(swing: Swing, planned: float) -> dict[str, object]:
    return {
        "assumption": swing.name,
        "unit": swing.unit,
        "low": round(swing.low, 4),
        "planned": round(swing.planned, 4),
        "high": round(swing.high, 4),
        "tok_s_per_device_at_low": _rate(swing.at_low),
        "tok_s_per_device_at_high": _rate(swing.at_high),
        "effect_tok_s_per_device": round(swing.effect(planned), 2),
        "why": swing.why,
    }


def _rate(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 2)
