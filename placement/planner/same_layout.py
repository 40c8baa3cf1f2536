"""One plan's layout, evaluated again with other devices or another setting; the batch is chosen anew.

`sensitivity.py` and `tornado.py` ask it. It searches no layouts: one evaluation finds one layout's batch.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.batches import best_batches
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import USEFUL, Question
from afserve.placement.planner.search import BATCH_LIMIT, PlanFamily, Targets

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a layout is evaluated with: the setting of its kind, and the devices of either half. prefill: what reads
    prompts where those devices do not; there are as many as it takes."""

    setting: Setting
    attention: Hardware
    experts: Hardware
    prefill: Hardware | None = None

    def with_scaled_chips(
        self, fields: tuple[str, ...], factor: float, sides: tuple[str, ...] = ("attention", "experts")
    ) -> "Conditions":
        """With `factor` times these figures of the devices of these sides."""

        def more(side: str, chip: Hardware) -> Hardware:
            figures = {field: getattr(chip, field) * factor for field in fields}
            return replace(chip, **figures) if side in sides else chip

        attention, experts = more("attention", self.attention), more("experts", self.experts)
        return replace(self, attention=attention, experts=experts)


def conditions_of(question: Question, plan: Plan) -> Conditions:
    """What `plan` was found with."""
    chips = {pool.chip.name: pool.chip for pool in question.pools}
    return Conditions(
        question.setting_of(plan),
        chips[plan.attention.hardware],
        chips[plan.experts.hardware],
        chips[plan.prefill.hardware] if plan.prefill else None,
    )


def family_of(question: Question, plan: Plan, ranks: Array, expert_devices: Array) -> PlanFamily:
    """Layouts like the plan's with so many ranks and expert devices (0: colocated)."""
    chips = {pool.chip.name: pool.chip for pool in question.pools}
    return PlanFamily(
        plan.kind,
        chips[plan.attention.hardware],
        chips[plan.experts.hardware],
        plan.attention.tensor_parallel,
        plan.micro_batches,
        ranks,
        expert_devices,
        chips[plan.prefill.hardware] if plan.prefill else None,
        decoders=plan.decoders,
    )


def targets_of(question: Question, plan: Plan) -> Targets:
    """The targets that `plan` was held to: where none was asked for, it is useful if it can be."""
    if question.floored and plan.tpot <= USEFUL * (1 + 1e-9):
        return replace(question.targets, tpot=USEFUL)
    return question.targets


def tokens_per_second(question: Question, plan: Plan, targets: Targets, given: Conditions) -> float | None:
    """Of the layout of `plan`, with the largest batch inside `targets`; the plan's own batch where the objective chose
    it. None where no batch meets the targets."""
    afd = plan.kind == "afd"
    family = PlanFamily(
        plan.kind,
        given.attention,
        given.experts if afd else given.attention,
        plan.attention.tensor_parallel,
        plan.micro_batches,
        np.array([float(plan.ranks)]),
        np.array([float(plan.experts.devices if afd else 0)]),
        given.prefill,
        BATCH_LIMIT * plan.devices,
        plan.decoders,
    )
    found = best_batches(family, given.setting, targets, running=question.layout.running)
    kept, batch = found.family, found.low
    if not len(batch):
        return None
    if plan.limited_by == "objective":
        batch = np.array([float(plan.batch)])
    tpot = float(kept.stages(given.setting, batch).tpot[0])
    requests = plan.all_ranks * float(batch[0]) * plan.micro_batches
    if given.setting.concurrency:
        requests = min(requests, given.setting.concurrency)
    return requests / tpot
