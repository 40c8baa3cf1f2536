"""Whether drafts pay: one layout at one batch with them and without, over all batches, and the best plans without.

It searches no layouts but for the plans without drafts. Values only.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.interval import WITHIN_80
from afserve.placement.planner.panel import asked_of_all, differences
from afserve.placement.planner.perf.drafting import NO_DRAFTS, Drafts
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question, RankedPlans
from afserve.placement.planner.same_layout import family_of
from afserve.placement.planner.sensitivity import verdict

Array = NDArray[np.float64]
_POINTS = 64
"""Batches that are tried between one request and what memory holds."""


@dataclass(frozen=True, slots=True)
class DraftWorth:
    """drafts: those of the best plan, or where it has none the best of those that were offered. gain: tokens per second
    over those without, at the plan's layout and batch; low and high hold 80 % of what is known of the acceptance.
    pays_up_to: the largest batch of a rank and micro-batch up to which drafts pay, 0 where they never do, None where
    they pay at every batch that fits. chosen: whether the best plan drafts. without: the best plans with no drafts,
    and the verdict on them over all engines."""

    drafts: Drafts
    gain: float
    low: float
    high: float
    pays_up_to: int | None
    chosen: bool
    without: RankedPlans
    verdict: str


def draft_worth(question: Question, best: Plan) -> DraftWorth | None:
    """None where the question has no drafts."""
    offered = [drafts for drafts in (question.setting.drafts, *question.draftable) if drafts.tokens]
    if not offered:
        return None
    setting = question.setting_for(best.kind)
    here = np.array([float(best.batch)])

    def gain(drafts: Drafts, batch: Array, deviations: float = 0.0) -> Array:
        varied = replace(drafts, length=drafts.further(deviations))
        plain, drafted = (
            _tpot(question, best, replace(setting, drafts=one), batch) for one in (NO_DRAFTS, varied)
        )
        return np.asarray(plain / drafted)

    drafts = best.drafts if best.drafts.tokens else max(offered, key=lambda one: float(gain(one, here)[0]))
    low, middle, high = (float(gain(drafts, here, far)[0]) for far in (-WITHIN_80, 0.0, WITHIN_80))
    batches = _batches(question, best, replace(setting, drafts=drafts))
    plain, without, panel = asked_of_all(question.with_drafts(NO_DRAFTS))
    first = without.best()
    return DraftWorth(
        drafts,
        middle,
        low,
        high,
        _pays_up_to(batches, gain(drafts, batches) > 1),
        best.drafts.tokens > 0,
        without,
        verdict(plain, without, panel.chance, differences(plain, panel, first)) if first else "",
    )


def _tpot(question: Question, plan: Plan, setting: Setting, batch: Array) -> Array:
    devices = float(plan.experts.devices if plan.kind == "afd" else 0)
    family = family_of(question, plan, np.full_like(batch, float(plan.ranks)), np.full_like(batch, devices))
    return family.stages(setting, batch).tpot


def _batches(question: Question, plan: Plan, setting: Setting) -> Array:
    """From one request to what memory holds of this layout."""
    one = np.ones(1)
    devices = one * (plan.experts.devices if plan.kind == "afd" else 0)
    family = replace(family_of(question, plan, one * plan.ranks, devices), prefill=None)
    most = max(float(family.batch_limit(replace(setting, concurrency=0.0))[0]), float(plan.batch))
    return np.unique(np.round(np.geomspace(1, most, _POINTS)))


def _pays_up_to(batches: Array, pays: NDArray[np.bool_]) -> int | None:
    """Up to the first batch from which on they do not."""
    paid = np.flatnonzero(pays)
    if not len(paid):
        return 0
    return None if paid[-1] == len(batches) - 1 else int(batches[paid[-1]])
