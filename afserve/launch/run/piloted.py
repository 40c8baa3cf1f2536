"""A pilot for a run: between which sizes it may move, where it gets what it sees and leaves what it learns."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from afserve.clock import Clock
from afserve.control.changing import Changing
from afserve.control.controller import Controller
from afserve.control.controller_wiring import nobody
from afserve.control.pilot.acting import PoolChanges
from afserve.control.pilot.classes import ClassAim
from afserve.control.pilot.hours import Hours
from afserve.control.pilot.judge import Judge
from afserve.control.pilot.learnt import learnt_of, recall
from afserve.control.pilot.live import LiveView
from afserve.control.pilot.loop import LOOK_SECONDS, PilotLoop
from afserve.control.pilot.measured import MeasuredModel
from afserve.control.pilot.observed import Observed
from afserve.control.pilot.plan import Planner
from afserve.control.pilot.policy import Policy, rules_for
from afserve.control.pilot.settings import ACT, OFF, PilotSettings
from afserve.control.pilot.sizes import Limits, PoolSizes, TargetTimes
from afserve.control.wire.desired import Deployment
from afserve.control.wire.load_values import GatewayLoad
from afserve.errors import ConfigError
from afserve.launch.plan.topology import Topology
from afserve.launch.processes.supervisor import Term
from afserve.member import AttentionPhase, Role
from afserve.server.access.classes import ServiceClass

log = logging.getLogger("afserve.pilot")


@dataclass(frozen=True, slots=True)
class PilotPlan:
    """What a pilot of a run is to do, checked before anything starts."""

    mode: str
    limits: Limits
    wanted: TargetTimes
    hold: float
    hours: Hours
    classes: tuple[ClassAim, ...] = ()
    idle: float = 0.0


def pilot_plan(
    settings: PilotSettings,
    topology: Topology,
    ttft: float,
    tpot: float,
    classes: Iterable[ServiceClass] = (),
) -> PilotPlan | None:
    """None without a pilot. `ttft` and `tpot` are the server's. There stay as many expert nodes as the copies need that
    were asked for. Raises ConfigError for limits that cannot be."""
    deployment, copies = topology.deployment, topology.copies
    first = _first_sizes(deployment)
    mode = settings.mode(pools=first.prefill > 0)
    if mode == OFF:
        _check_unused(settings)
        return None
    if settings.pilot_idle and mode != ACT:
        raise ConfigError("--pilot-idle: does nothing without --pilot act", param="pilot_idle")
    placement = deployment.placement
    room = max(1, placement.slots_per_node() - topology.slots.moving)
    least = max(copies, -(-copies * placement.experts // room)) if first.experts else 0
    attention = deployment.most(Role.ATTENTION)
    experts = deployment.most(Role.EXPERT) if first.experts else 0
    most = PoolSizes(attention - 1 if first.prefill else 0, attention, experts)
    return PilotPlan(
        mode,
        settings.limits(first, least, most),
        settings.wanted(ttft, tpot),
        settings.pilot_hold,
        settings.hours,
        tuple(one.aim for one in classes),
        settings.pilot_idle,
    )


_UNUSED = (
    *("pilot_min", "pilot_max", "pilot_nodes", "pilot_usd", "pilot_price", "pilot_hours"),
    *("pilot_ttft", "pilot_tpot", "pilot_idle"),
)


def _check_unused(settings: PilotSettings) -> None:
    for name in _UNUSED:
        if getattr(settings, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: does nothing without --pilot advise or --pilot act", param=name)


def _first_sizes(deployment: Deployment) -> PoolSizes:
    attention = range(deployment.count(Role.ATTENTION))
    reads = sum(deployment.phase(index) is AttentionPhase.PREFILL for index in attention)
    return PoolSizes(reads, len(attention) - reads, deployment.count(Role.EXPERT))


def pilot_loop(
    plan: PilotPlan | None,
    controller: Controller,
    changing: Changing,
    clock: Clock,
    own_load: Callable[[], GatewayLoad],
    term: Term | None,
    name: str,
) -> PilotLoop | None:
    """None without a plan. `own_load`: of the gateway in this process. What the pilot of this model, by its name, had
    learnt before is known in `term`, where there is one, and is told there."""
    if plan is None:
        return None
    view, rules = LiveView(controller.membership.state), rules_for(plan.hold)

    def observe() -> Observed:
        loads: list[tuple[object, GatewayLoad]] = [(None, own_load()), *controller.chronicle.loads.items()]
        return view.observe(clock.now(), controller.members, dict(loads))

    model = MeasuredModel()
    policy = Policy(Planner(model, plan.wanted, plan.limits), rules, plan.classes)
    look = min(LOOK_SECONDS, rules.windows.short / 4)
    changes = PoolChanges(changing.change, view.names)
    return PilotLoop(
        plan.mode,
        policy,
        observe,
        changes,
        clock,
        look,
        lambda: plan.hours.hold_at(time.localtime()),
        _going_on(term, name, policy.judge, model),
    )


def _going_on(term: Term | None, name: str, judge: Judge, model: MeasuredModel) -> Callable[[], None]:
    """From what was learnt before; what is returned tells it as it is then."""
    if term is None:
        return nobody
    reports = term.reports
    if (said := reports.learnt.get(name)) is not None:
        try:
            recall(said, judge, model)
        except ValueError as error:
            log.warning("what the pilot had learnt cannot be: %s; it is learnt anew", error)
    return lambda: reports.note_learnt(name, learnt_of(judge, model))
