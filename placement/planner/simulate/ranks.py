"""From a plan to the inputs of the request simulation: seconds of steps and prompts, arrivals per rank.

Seconds of a step are by the number of requests in it.
"""

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.prefill import reader
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question
from afserve.placement.planner.same_layout import family_of
from afserve.placement.planner.simulate.requests import Arrivals, PrefillPool, Rank, poisson

Array = NDArray[np.float64]


def rank_of(question: Question, plan: Plan, simulated: Array | None) -> Rank:
    """One rank of `plan`. `simulated` step seconds of the full batch give the factors; without them, 1."""
    setting, slots = question.setting_of(plan), plan.batch * plan.micro_batches
    devices = float(plan.experts.devices if plan.kind == "afd" else 0)
    family = family_of(question, plan, np.full(slots, float(plan.ranks)), np.full(slots, devices))
    held = np.arange(1, slots + 1, dtype=np.float64)
    stages = family.stages(setting, held / plan.micro_batches)
    decode = stages.iteration * (1 - stages.prefill_share)
    prompt = float(stages.iteration[-1] * stages.prefill_share[-1])
    read = slots * setting.tokens_per_step / setting.workload.mean_answer * setting.workload.mean_prompt
    full = float(decode[-1])
    factors = np.ones(1) if simulated is None else simulated / full
    return Rank(
        slots=slots,
        step=np.concatenate([decode[:1], decode]),
        factors=factors,
        prompt_second=prompt / read if read > 0 else 0.0,
        tokens_per_step=setting.tokens_per_step,
    )


def arrivals_for(
    question: Question, plan: Plan, load: float, count: int, rank: int, rng: np.random.Generator
) -> Arrivals:
    """A rank's share: every ranks-th request of a trace, sped up or slowed to `load`, or Poisson arrivals at it."""
    work = question.setting.workload
    wanted = load * plan.tok_s / plan.all_ranks / work.mean_answer
    answer = work.answer if work.mean_answer > 1 else np.full_like(work.answer, 128.0)
    if work.mean_answer <= 1:
        wanted /= 128.0
    if not len(work.arrival):
        return poisson(wanted, count, work.prompt, answer, rng)
    mine = slice(rank, rank + count * plan.all_ranks, plan.all_ranks)
    seconds = work.arrival[mine]
    span = float(seconds[-1] - seconds[0]) if len(seconds) > 1 else 1.0
    pace = (len(seconds) - 1) / span / wanted if span > 0 and len(seconds) > 1 else 1.0
    return Arrivals((seconds - seconds[0]) * pace, work.prompt[mine], answer[mine])


def reading_pool(question: Question, plan: Plan) -> PrefillPool | None:
    """The devices that only read prompts; None where those that decode do."""
    if plan.prefill is None:
        return None
    chips = {pool.chip.name: pool.chip for pool in question.pools}
    chip, setting = chips[plan.prefill.hardware], question.setting_of(plan)
    beside = chips[plan.experts.hardware] if plan.kind == "afd" else None
    found = reader(setting, chip, beside, np.array([float(plan.experts.devices)]))
    assert found is not None, "the plan has it"
    found = found.among(plan.prompt_parts, chip.network) if plan.prompt_parts > 1 else found
    mean = setting.workload.mean_prompt
    network = min(chip.network, chips[plan.attention.hardware].network)
    return PrefillPool(
        workers=int(plan.prefill.devices / found.size),
        busy=float(found.seconds[0]) / mean,
        latency=(float(found.latency[0]) + found.moved / network) / mean,
    )
