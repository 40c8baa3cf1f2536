"""`afserve simulate --pilot`: the plan's pools change size while requests come, beside the same pools left alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from afserve.cli.options import Within, option
from afserve.control.pilot.plan import Planner
from afserve.control.pilot.policy import Policy, rules_for
from afserve.control.pilot.replay.compare import most_served
from afserve.control.pilot.replay.counts import Packet
from afserve.control.pilot.replay.events import EventRun
from afserve.control.pilot.replay.rivals import demand_of
from afserve.control.pilot.replay.run import PlayedDay, World, play_on
from afserve.control.pilot.replay.tabled import TabledModel, TabledStages
from afserve.control.pilot.sizes import Limits, PoolSizes, TargetTimes
from afserve.errors import ConfigError, DoesNotFitError
from afserve.placement.planner.infeasible import describe
from afserve.placement.planner.perf.workload import Workload
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question
from afserve.placement.planner.simulate.phase_stages import pieces_on_gpu
from afserve.placement.planner.simulate.phase_tables import StageTables

FLOOR = 0.25  # of the experts' time goes to prompts that wait, at least
REQUESTS = 20_000
_LOOK = 10.0  # seconds
_OTHERS = ("steps", "jitter", "stall", "lose", "mtbf", "timeline", "concurrency")


@dataclass(frozen=True, slots=True)
class PilotFlags:
    """Pools that size themselves."""

    pilot: bool = option(
        default=False,
        is_flag=True,
        help="Pools change size as a pilot advises, within --pool, beside the plan as it is. For AFD with prompts "
        "apart on one kind of device, by the times of kernels.",
    )
    pilot_hold: float = option(
        default=600.0, type=Within(1, 86_400), help="Seconds as of `afserve up`.  [default: 600]"
    )
    pilot_start: float = option(
        default=20.0, type=Within(0, 3600), help="With --pilot: seconds until a device serves.  [default: 20]"
    )


def check_pilot(flags: PilotFlags) -> None:
    """Raises ConfigError for what is not played together, and for what says something of no pilot."""
    context = click.get_current_context()
    typed = [
        name
        for name in (*_OTHERS, "pilot_hold", "pilot_start")
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if flags.pilot and (others := [name for name in typed if name in _OTHERS]):
        raise ConfigError(f"--pilot: --{others[0]} is not played with it; drop one", param=others[0])
    if not flags.pilot and (own := [name for name in typed if name not in _OTHERS]):
        raise ConfigError(f"--{own[0].replace('_', '-')}: does nothing without --pilot", param=own[0])


def with_pilot(
    question: Question, plan: Plan, flags: PilotFlags, load: float, requests: int | None, seed: int
) -> dict[str, Any]:
    """Both runs, for JSON. Raises ConfigError or DoesNotFitError naming the flag."""
    stages, sizes = _stages(question, plan), _sizes(plan)
    wanted = TargetTimes(question.targets.ttft, question.targets.tpot)
    rate = load * _served(stages, wanted, sizes, question.setting.workload)
    packets = _packets(question.setting.workload, rate, requests or REQUESTS, np.random.default_rng(seed))
    devices = question.pools[0].count
    limits = Limits(stages.least().at_most(sizes), PoolSizes(devices, devices, devices), devices)
    rules = rules_for(flags.pilot_hold)
    policy = Policy(Planner(TabledModel(stages), wanted, limits), rules)
    world = World(stages, wanted, flags.pilot_start, look=min(_LOOK, rules.windows.short / 4))
    runs = [
        play_on(world, EventRun(stages, packets, wanted, sizes), sizer)
        for sizer in (lambda seen: None, policy.sizes)
    ]
    return {
        "plan": describe(plan),
        "load": load,
        "requests": len(packets),
        "requests_per_s": round(rate, 3),
        "hours": round(packets[-1].at / 3600, 3),
        **{name: _row(one) for name, one in zip(("left_alone", "pilot"), runs, strict=True)},
        "intervals": dict(zip(("compared", "held"), policy.judge.intervals, strict=True)),
    }


def _stages(question: Question, plan: Plan) -> TabledStages:
    asked = "add --kind afd --prompts apart --tensor-parallel 1"
    if plan.kind != "afd" or plan.prefill is None or plan.attention.tensor_parallel > 1:
        raise ConfigError(
            f"--pilot: sizes prefill, attention and experts, and the best plan is {describe(plan)}; {asked}"
        )
    if len(question.pools) > 1:
        raise ConfigError("--pilot: pools of one kind of device are played; keep one --pool", param="pools")
    if not np.isfinite((question.targets.ttft, question.targets.tpot)).all():
        raise ConfigError("--pilot: pools are sized for both targets; add --ttft and --tpot")
    setting, chip = question.setting_of(plan), question.pools[0].chip
    pieces = pieces_on_gpu(chip, setting.shape.expert_row, setting.precision.experts, FLOOR)
    return TabledStages(StageTables(setting, chip), pieces)


def _sizes(plan: Plan) -> PoolSizes:
    assert plan.prefill is not None, "it was asked for"
    return PoolSizes(plan.prefill.devices, plan.attention.devices, plan.experts.devices)


def _served(stages: TabledStages, wanted: TargetTimes, sizes: PoolSizes, work: Workload) -> float:
    """Requests per second of these sizes, by the stage times that are played."""
    alike = [Packet(0.0, int(prompt), int(answer)) for prompt, answer in _lengths(work)]
    demand = demand_of(alike, 1.0)
    assert demand is not None, "a workload has lengths"
    found = most_served(Planner(TabledModel(stages), wanted, Limits(sizes, sizes, sizes.total)), demand)
    if not found:
        raise DoesNotFitError(
            f"--pilot: by the times of kernels {sizes} devices (prefill, attention, experts) meet --ttft and --tpot at "
            "no load; give more time"
        )
    return found


def _lengths(work: Workload) -> list[tuple[float, float]]:
    return list(zip(work.prompt.tolist(), np.maximum(work.answer, 1.0).tolist(), strict=True))


def _packets(work: Workload, rate: float, count: int, rng: np.random.Generator) -> list[Packet]:
    """A trace's arrivals, each so many times within a second that `rate` is reached; without one Poisson's."""
    if len(work.arrival) > 1:
        seconds = work.arrival - work.arrival[0]
        times = rate * max(float(seconds[-1]), 1.0) / len(seconds)
        picked = np.repeat(np.arange(len(seconds)), rng.poisson(times, len(seconds)))[:count]
        at = seconds[picked] + rng.random(len(picked))
    else:
        picked = rng.integers(0, len(work.prompt), count)
        at = np.cumsum(rng.exponential(1 / rate, count))
    lengths = _lengths(work)
    found = [Packet(float(when), *map(int, lengths[number])) for when, number in zip(at, picked, strict=True)]
    if not found:
        raise ConfigError("--load: nothing arrives; give more", param="load")
    return sorted(found, key=lambda one: one.at)


def _row(one: PlayedDay) -> dict[str, Any]:
    changes = [{"at_s": round(at, 1), "sizes": str(sizes)} for at, sizes in one.changes[1:]]
    return {**one.figures(), "changes": changes}


def pilot_text(values: dict[str, Any]) -> str:
    lines = [
        values["plan"],
        f"{values['requests']:,} requests in {values['hours']:.2f} h at {values['load']:.0%} of what the plan serves, "
        "by the times of kernels:",
    ]
    for name, words in (("left_alone", "left alone"), ("pilot", "pilot")):
        row = values[name]
        lines.append(
            f"{words:10} {row['attainment']:8.2%} inside both targets, {row['device_hours']:,.1f} device hours, "
            f"{len(row['changes'])} changes"
        )
    return "\n".join(lines + _changes(values["pilot"]["changes"]))


def _changes(changes: Sequence[dict[str, Any]]) -> list[str]:
    if not changes:
        return []
    said = ", ".join(f"{one['sizes']} at {one['at_s']:,.0f} s" for one in changes[:20])
    more = f", and {len(changes) - 20} more" if len(changes) > 20 else ""
    return [f"prefill:attention:experts {said}{more}"]
