"""What the loss of a device costs a plan: how long everybody waits, how long its place is empty, how fast the rest is.

The rules are those by which afserve recovers (docs/survive-losses.md). Experts of a lost device that stand nowhere else
are read again by the devices that are left; requests of a lost attention rank are computed again on the others; the
place is filled anew once its weights are read. It plays nothing and draws nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.kv import attention_weight_bytes, expert_weight_bytes
from afserve.placement.planner.perf.prefill import decoding_only
from afserve.placement.planner.perf.setting import NOTHING_FOUND
from afserve.placement.planner.perf.stages import prompt_seconds
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question
from afserve.placement.planner.same_layout import family_of
from afserve.placement.planner.search import PlanFamily
from afserve.placement.planner.simulate.pace import SpeedProfile
from afserve.placement.planner.simulate.ranks import reading_pool

Array = NDArray[np.float64]
NOTICE = 1.11
"""Seconds until a silent node is lost: `expert node stopped for ever` in bench/results/faults.jsonl, the median stall
with a limit of 1 s. A process that ends is noticed in 0.03 s (`expert node killed, two copies`)."""
PLACE = 0.26
"""Seconds until experts that stand nowhere else are placed anew and their reading begins: what `expert node killed,
experts reloaded` takes longer than `two copies`, of a model whose weights are read in no time."""
RESTART = 0.38
"""Seconds until a killed process serves again, of a model whose weights are read in no time: `back_ms` of the same."""
RELOAD = 2e9
"""Bytes of weights per second and device. Assumed: eight devices share a disk or a network of 16 GB/s."""
READERS = "prefill"
_EACH = 32  # numbers of empty places whose speed is computed; between them it is read off
BLOCK = 16
"""Tokens of a KV block: with copies, what a request has beyond its last full block is computed again."""


@dataclass(frozen=True, slots=True)
class RecoveryTimes:
    """Seconds: `notice` until a loss is known, `restart` until a replacement begins to read weights, at `reload`
    bytes/s. kv_copies: whether another attention rank has a copy of running requests' KV. all_end: whether a loss ends
    everything, which then starts anew, as of engines that cannot go on without a device."""

    notice: float = NOTICE
    restart: float = RESTART
    reload: float = RELOAD
    kv_copies: bool = False
    all_end: bool = False


@dataclass(frozen=True, slots=True)
class DeviceLoss:
    """A device of that role is lost `at` so many seconds."""

    role: str
    at: float


@dataclass(frozen=True, slots=True)
class PlanRole:
    """One kind of place in a plan. units: how many, each of `size` devices that are lost together. stall: seconds that
    every rank waits after a loss. down: seconds until the place is filled again. speed[n]: of steps (of reading, where
    it only reads prompts) with n places empty, once what remains goes on; 0 where it cannot. moves: its requests go on
    elsewhere. instances: that decode by themselves, and have so many units each."""

    name: str
    units: int
    size: int
    stall: float
    down: float
    speed: tuple[float, ...]
    moves: bool = False
    instances: int = 1

    @property
    def devices(self) -> int:
        return self.units * self.size * self.instances


def roles_of(question: Question, plan: Plan, recovery: RecoveryTimes) -> tuple[PlanRole, ...]:
    """The places of `plan` that can be lost: `attention`, `experts` and `prefill`, or `devices` where each has both."""
    found = [_decoding(question, plan, recovery)]
    if plan.kind == "afd":
        found.append(_experts(question, plan, recovery))
    if plan.prefill is not None:
        found.append(_readers(question, plan, recovery))
    if not recovery.all_end:
        return tuple(found)
    anew = max(role.down for role in found)
    return tuple(replace(role, stall=anew, down=anew, speed=(1.0, 1.0), moves=True) for role in found)


def again_second(question: Question, plan: Plan) -> float:
    """Seconds that a rank takes to compute one token of a context again."""
    setting = question.setting_of(plan)
    work = replace(setting.workload, decode_only=False)
    chips = {pool.chip.name: pool.chip for pool in question.pools}
    devices = float(plan.experts.devices)
    attention, experts = prompt_seconds(
        replace(setting, workload=work, found=NOTHING_FOUND),
        chips[plan.attention.hardware],
        chips[plan.experts.hardware],
        plan.attention.tensor_parallel,
        np.array([float(plan.ranks)]),
        np.array([devices]),
    )
    both = attention + experts if plan.kind == "colocated" else np.maximum(attention, experts)
    return float(both[0]) / work.mean_prompt


def _decoding(question: Question, plan: Plan, recovery: RecoveryTimes) -> PlanRole:
    """Attention ranks, or colocated ones, which take their share of the experts with them."""
    setting, degree = question.setting_of(plan), plan.attention.tensor_parallel
    held = attention_weight_bytes(setting.held, setting.precision, degree)
    if plan.kind == "afd":
        down = recovery.notice + recovery.restart + held / recovery.reload
        return PlanRole("attention", plan.ranks, degree, 0.0, down, (1.0,) * (plan.ranks + 1), moves=True)
    experts = _expert_bytes(question, plan)
    down = recovery.notice + recovery.restart + (held + experts) / recovery.reload
    left, speed = (plan.ranks - 1) * degree, _speeds(question, plan)
    stall = _stall(question, recovery, experts * degree, left, down) if speed[1] else down
    return PlanRole("devices", plan.ranks, degree, stall, down, speed, moves=True, instances=plan.decoders)


def _experts(question: Question, plan: Plan, recovery: RecoveryTimes) -> PlanRole:
    held = _expert_bytes(question, plan)
    down = recovery.notice + recovery.restart + held / recovery.reload
    left, speed = plan.experts.devices - 1, _speeds(question, plan)
    stall = _stall(question, recovery, held, left, down) if speed[1] else down
    return PlanRole("experts", plan.experts.devices, 1, stall, down, speed)


def _readers(question: Question, plan: Plan, recovery: RecoveryTimes) -> PlanRole:
    """Devices that only read prompts: colocated ones hold all experts."""
    pool = reading_pool(question, plan)
    assert pool is not None and plan.prefill is not None, "the plan has it"
    setting, places = question.setting_of(plan), pool.workers * plan.prompt_parts
    size = plan.prefill.devices // places
    held = attention_weight_bytes(setting.held, setting.precision, 1)
    if plan.kind == "colocated":
        one = np.array([float(size)])
        held += float(expert_weight_bytes(setting.held, setting.precision, setting.routing, one)[0])
    down = recovery.notice + recovery.restart + held / recovery.reload
    speed = tuple(float(left) / places for left in range(places, -1, -1))
    return PlanRole(READERS, places, size, 0.0, down, speed)


def _expert_bytes(question: Question, plan: Plan) -> float:
    """Of one device."""
    setting = question.setting_of(plan)
    devices = np.array([float(plan.experts.devices)])
    return float(expert_weight_bytes(setting.held, setting.precision, setting.routing, devices)[0])


def _stall(question: Question, recovery: RecoveryTimes, lost: float, left: int, down: float) -> float:
    """Until every expert has a device again: at once where each has another copy, else when those that are `left` have
    read their part of the `lost` bytes, or the place is filled."""
    if left < 1:
        return down
    if question.setting.routing.copies > 1:
        return recovery.notice
    return min(recovery.notice + PLACE + lost / left / recovery.reload, down)


def _speeds(question: Question, plan: Plan) -> tuple[float, ...]:
    """By how many places are empty: seconds per token of the whole over those of what is left; 0 where that cannot
    hold the experts. Ranks keep their batch; that colocated caches have less room is not counted."""
    setting, afd = question.setting_of(plan), plan.kind == "afd"
    units = plan.experts.devices if afd else plan.ranks

    def layouts(left: Array) -> PlanFamily:
        ranks = np.full_like(left, float(plan.ranks)) if afd else left
        return replace(family_of(question, plan, ranks, left if afd else 0 * left), prefill=None)

    empty = np.arange(float(units))
    some = np.unique(np.concatenate([empty[:_EACH], np.round(np.linspace(0, units - 1, _EACH))]))
    decoding = decoding_only(setting) if plan.prefill else setting
    tpot = layouts(units - some).stages(decoding, np.full_like(some, float(plan.batch))).tpot
    once = replace(setting, routing=replace(setting.routing, copies=1))
    fits = layouts(units - empty).batch_limit(once) >= 1
    fits[0] = True  # it is the plan
    speed = np.where(fits, np.minimum(tpot[0] / np.interp(empty, some, tpot), 1.0), 0.0)
    return (*(float(one) for one in np.minimum.accumulate(speed)), 0.0)


@dataclass(frozen=True, slots=True)
class Outage:
    """A loss as it is played. `stalled`: until when every rank waits; `back`: when the place is filled again."""

    role: PlanRole
    at: float
    stalled: float
    back: float


def outages(roles: Iterable[PlanRole], losses: Iterable[DeviceLoss]) -> list[Outage]:
    """In order of time."""
    named = {role.name: role for role in roles}
    found = [
        Outage(named[one.role], one.at, one.at + named[one.role].stall, one.at + named[one.role].down)
        for one in losses
    ]
    return sorted(found, key=lambda one: one.at)


def pace_of(happened: Iterable[Outage]) -> SpeedProfile:
    """The speed at which steps go on while and after these are lost."""
    return _pace([one for one in happened if one.role.name != READERS or one.role.moves])


def reading_pace(happened: Iterable[Outage], kind: str, *, all_end: bool) -> SpeedProfile:
    """The speed at which the devices that only read prompts do so, together. Those of AFD need the experts too."""
    return _pace([one for one in happened if one.role.name == READERS or kind == "afd" or all_end])


def _pace(happened: list[Outage]) -> SpeedProfile:
    times = sorted({0.0, *(when for one in happened for when in (one.at, one.stalled, one.back))})
    return SpeedProfile.from_steps(times, [_speed(happened, when) for when in times])


def _speed(happened: list[Outage], when: float) -> float:
    if any(one.at <= when < one.stalled for one in happened):
        return 0.0
    speed = 1.0
    for role in {one.role.name: one.role for one in happened}.values():
        empty = sum(one.role.name == role.name and one.at <= when < one.back for one in happened)
        speed *= role.speed[min(empty, len(role.speed) - 1)]
    return speed


def computed_again(context: float, recovery: RecoveryTimes) -> float:
    """Tokens of this context that are computed again where it goes on."""
    kept = recovery.kv_copies and not recovery.all_end
    return min(context, float(BLOCK)) if kept else context
