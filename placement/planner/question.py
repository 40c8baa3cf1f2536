"""The question `afserve plan` answers: which deployment is best, what comes next, and does disaggregation pay.

Searches every family, ranks by the objective and keeps the best of each kind. `verdict.py` puts it into words,
`infeasible.py` says what failed when nothing fits. Pure: values in, values out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.batches import best_batches
from afserve.placement.planner.one_machine import OneMachine, Processes
from afserve.placement.planner.perf.drafting import Drafts
from afserve.placement.planner.perf.engine import Engine
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.plan import Plan, plan_of
from afserve.placement.planner.search import (
    ANY,
    BATCH_LIMIT,
    HERE,
    DevicePool,
    GivenLayout,
    PlanFamily,
    Targets,
    families,
)

Array = NDArray[np.float64]
KINDS = ("colocated", "afd")
NO_TARGETS = Targets()
USEFUL = 0.2
"""Seconds per token at most where no target is given: five tokens a second, about as fast as people read."""


@dataclass(frozen=True, slots=True)
class Question:
    """Pools, targets, objective (`dollar`, `device`, `watt`: tokens per; `latency`: lowest TPOT; `speed`: tokens per
    second, of the requests in flight; `count`: fewest devices that sustain `tokens_per_second`), which micro-batch
    counts and kinds to try. engines: by kind. others: those whose
    rows bear on it too (`panel.py`). prompts: who may read them, as in `families`. machine: all nodes of AFD
    are its processes, with the requests in flight of `setting`; None where each has a host of its own. draftable: with
    0, 1, 2 and so on drafted tokens, where each candidate takes the best of them; none where `setting` says it."""

    setting: Setting
    pools: tuple[DevicePool, ...]
    targets: Targets = NO_TARGETS
    objective: str = "dollar"
    micro_batches: tuple[int, ...] = (1, 2, 3, 4)
    kinds: tuple[str, ...] = KINDS
    tokens_per_second: float = 0.0
    layout: GivenLayout = ANY
    engines: tuple[tuple[str, Engine], ...] = ()
    others: tuple[tuple[str, Engine], ...] = ()
    prompts: tuple[str, ...] = (HERE,)
    machine: OneMachine | None = None
    draftable: tuple[Drafts, ...] = ()

    @property
    def floored(self) -> bool:
        """Whether nobody said how fast a plan must be, so that it need only be useful."""
        asked = np.isfinite(self.targets.tpot) or self.setting.concurrency > 0
        return not asked and self.objective != "latency"

    def setting_for(self, kind: str) -> Setting:
        """The setting of deployments of one kind (colocated, afd), served by the engine of that kind."""
        engine = dict(self.engines).get(kind)
        return self.setting if engine is None else self.setting.served_by(engine)

    def setting_of(self, plan: Plan) -> Setting:
        """The setting that `plan` was found with."""
        return replace(self.setting_for(plan.kind), drafts=plan.drafts)

    def with_drafts(self, drafts: Drafts) -> "Question":
        """The same where every candidate drafts so."""
        return replace(self, setting=replace(self.setting, drafts=drafts), draftable=())

    def runs(self, family: PlanFamily) -> bool:
        """Whether the engine of that kind runs such parts: what was asked for by name is tried in any case."""
        engine = dict(self.engines).get(family.kind)
        if engine is None:
            return True
        degree = self.layout.tensor_parallel or family.tensor_parallel in engine.parallel
        asked = set(self.micro_batches) & set(engine.micro_batches)
        return bool(degree) and (not asked or family.micro_batches in asked)


@dataclass(frozen=True, slots=True)
class RankedPlans:
    """Plans best first, at most one per family; `tried` counts layouts."""

    plans: tuple[Plan, ...]
    tried: int

    def best(self, kind: str | None = None) -> Plan | None:
        return next((plan for plan in self.plans if kind in (None, plan.kind)), None)


@dataclass(frozen=True, slots=True)
class KindPlans:
    """What was found of one kind of deployment: (what it is sorted by, plan), and how many layouts were tried."""

    found: tuple[tuple[tuple[bool, float, float], Plan], ...]
    tried: int

    def best(self) -> Plan | None:
        return ranked([self]).best()


def answer(question: Question) -> RankedPlans:
    """Empty `plans` when no deployment meets the targets in these pools."""
    return ranked(plans_of_kind(question, kind) for kind in KINDS if kind in question.kinds)


def ranked(parts: Iterable[KindPlans]) -> RankedPlans:
    """The plans of several kinds together."""
    kept = tuple(parts)
    found = sorted((one for part in kept for one in part.found), key=itemgetter(0))
    return RankedPlans(tuple(plan for _, plan in found), sum(part.tried for part in kept))


def plans_of_kind(question: Question, kind: str) -> KindPlans:
    """They depend on the engine of that kind, and on no other one."""
    found: list[tuple[tuple[bool, float, float], Plan]] = []
    tried = 0
    found_all = families(
        list(question.pools), question.micro_batches, (kind,), question.layout, question.prompts
    )
    for family in filter(question.runs, found_all):
        tried += len(family.ranks)
        best = _best_drafted(family, question)
        if best is not None and question.machine is not None and kind == "afd":
            best = _on_one_machine(question, question.machine, *best)
        if best is not None:
            score, plan = best
            slow = question.floored and plan.tpot > USEFUL * (1 + 1e-9)
            found.append(((slow, score, plan.usd_per_mtok), plan))
    return KindPlans(tuple(found), tried)


_FIRST_TRIED = (0, 1, 2, 4, 8)
"""Drafted tokens, then the neighbours of the best."""


def _best_drafted(family: PlanFamily, question: Question) -> tuple[float, Plan] | None:
    """With as many drafted tokens as score best, where those are not given. Of equals the fewest."""
    if not question.draftable:
        return _best_of(family, question)
    most, tried = len(question.draftable) - 1, dict[int, tuple[float, Plan] | None]()

    def score(tokens: int) -> tuple[bool, float, int]:
        if tokens not in tried:
            tried[tokens] = _best_of(family, question.with_drafts(question.draftable[tokens]))
        found = tried[tokens]
        if found is None:
            return True, np.inf, tokens
        return question.floored and found[1].tpot > USEFUL * (1 + 1e-9), found[0], tokens

    best = min((tokens for tokens in _FIRST_TRIED if tokens <= most), key=score)
    low, high = (best + 1) // 2, 2 * best
    best = min((tokens for tokens in range(low, min(high, most) + 1)), key=score)
    return tried[best]


def _on_one_machine(
    question: Question, machine: OneMachine, score: float, plan: Plan
) -> tuple[float, Plan] | None:
    """The same layout as processes of one machine; None where it is too slow then. Scores are per token. First tokens
    are not told: prompts are not played."""
    prefill, requests = question.setting.prefill, min(question.setting.concurrency, float(plan.requests))
    idle = round(max(prefill.devices, 1) * prefill.workers) if prefill else 0
    nodes = Processes(plan.ranks, plan.experts.devices, plan.micro_batches, requests, idle)
    tpot = machine.tpot(nodes, question.setting.workload.context_mean)
    if tpot > question.targets.tpot:
        return None
    return score * tpot / plan.tpot, replace(plan, tpot=tpot, tok_s=requests / tpot, decode_only=True)


def _best_of(family: PlanFamily, question: Question) -> tuple[float, Plan] | None:
    """Fast enough to be useful where nobody said how fast; where none is, the best without that floor."""
    if not question.floored:
        return _best_inside(family, question, question.targets, "SLO")
    floor = replace(question.targets, tpot=USEFUL)
    useful = _best_inside(family, question, floor, "usefulness")
    return useful or _best_inside(family, question, question.targets, "SLO")


def _best_inside(
    family: PlanFamily, question: Question, targets: Targets, limit_name: str
) -> tuple[float, Plan] | None:
    setting = question.setting_for(family.kind)
    capped = question.tokens_per_second or setting.concurrency
    cost = None if capped else _cost(family, question.objective)
    soonest = question.objective == "latency" and not question.tokens_per_second  # one request at a time
    running = 1 if soonest else question.layout.running
    kept, batch, limit = best_batches(family, setting, targets, cost, running)
    if not len(batch):
        return None
    score, instances = _score(kept, question, setting, batch)
    index = int(np.argmin(score))
    if not np.isfinite(score[index]):
        return None
    best, most = float(batch[index]), float(limit[index])
    limited_by = limit_name if best < most else _full(setting, kept, most, index)
    if soonest:
        limited_by = "objective"
    elif best < most and not _read(kept, setting, index, best + 1):
        limited_by = "readers"
    places = most if limited_by == "readers" else best
    plan = plan_of(kept, setting, index, best, places, limited_by)
    return float(score[index]), replace(plan, instances=int(instances[index]))


def _full(setting: Setting, family: PlanFamily, most: float, index: int) -> str:
    """What keeps a batch at its limit: as many requests as clients keep in flight, memory, or the search's own end."""
    if setting.concurrency and most * family.ranks[index] * family.micro_batches >= setting.concurrency:
        return "requests"
    return "memory" if most < BATCH_LIMIT else "search"


def _read(family: PlanFamily, setting: Setting, index: int, batch: float) -> bool:
    """Whether readers bring so many requests to decode in layout `index`."""
    one = family.subset(np.arange(len(family.ranks)) == index)
    tpot = one.stages(setting, np.array([batch])).tpot
    return bool(one.decodes(setting, np.array([batch]), tpot)[0])


def _cost(family: PlanFamily, objective: str) -> Array | None:
    """What the objective counts per second of this layout; None when it does not count per token."""
    attention, experts = family.decode_devices, family.expert_devices
    if objective == "dollar":
        return attention * family.attention.usd_per_hour + experts * family.experts.usd_per_hour
    if objective == "device":
        return np.asarray(attention + experts)
    if objective == "watt":
        return attention * family.attention.watts + experts * family.experts.watts
    return None


def _counted(chip: Hardware | None, objective: str) -> float:
    """The same of one device."""
    if chip is None:
        return 0.0
    return {"dollar": chip.usd_per_hour, "watt": chip.watts}.get(objective, 1.0)


def _score(family: PlanFamily, question: Question, setting: Setting, batch: Array) -> tuple[Array, Array]:
    """(lower is better, infinite where the pools do not reach the wanted rate; how many instances it takes)."""
    stages = family.stages(setting, batch)
    speed = family.ranks * batch * family.micro_batches * family.decoders / stages.tpot
    speed = np.minimum(speed, (setting.concurrency or np.inf) / stages.tpot)
    cost = _cost(family, question.objective)
    if cost is not None:
        score = (cost + stages.prefill * _counted(family.prefill, question.objective)) / speed
    elif question.objective == "latency":
        score = stages.tpot
    elif question.objective == "speed":
        score = 1 / speed
    else:
        score = family.decode_devices + family.expert_devices + stages.prefill
    if not question.tokens_per_second:
        return np.asarray(score), np.ones_like(speed)
    instances = np.maximum(np.ceil(question.tokens_per_second / speed * (1 - 1e-9)), 1.0)
    whole = (
        score
        * instances
        * (speed if cost is not None else 1.0 if question.objective == "count" else 1 / instances)
    )
    held = _instances_held(family, question.pools, stages.prefill)
    return np.asarray(np.where(instances <= held, whole, np.inf)), instances


def _instances_held(family: PlanFamily, pools: tuple[DevicePool, ...], prefill: Array) -> Array:
    """How many instances of each layout the pools hold."""
    sides = [
        (family.attention, family.ranks * family.tensor_parallel),
        (family.experts, family.expert_devices),
    ]
    sides += [(family.prefill, prefill)] if family.prefill is not None else []
    held = np.full_like(family.ranks, np.inf)
    for pool in pools:
        used = sum((devices for chip, devices in sides if chip.name == pool.chip.name), np.zeros_like(held))
        if not pool.endless:
            held = np.where(used > 0, np.minimum(held, pool.count // np.maximum(used, 1.0)), held)
    return np.asarray(held)


def pareto(question: Question, points: int = 12) -> Iterator[tuple[float, dict[str, list[Plan]]]]:
    """The best plan of each kind at `points` TPOT targets, from the fastest possible to well beyond the wanted one.

    Yields (share done, curves so far), so that a caller can show progress.
    """
    fastest = answer(replace(question, objective="latency", targets=NO_TARGETS, tokens_per_second=0.0)).best()
    curves: dict[str, list[Plan]] = {kind: [] for kind in question.kinds}
    if fastest is None:
        return
    slowest = max(4 * fastest.tpot, 2 * min(question.targets.tpot, 0.5))
    for number, target in enumerate(np.geomspace(fastest.tpot * 1.02, slowest, points), start=1):
        found = answer(replace(question, targets=replace(question.targets, tpot=float(target))))
        for kind, plans in curves.items():
            best = found.best(kind)
            if best is not None:
                plans.append(best)
        yield number / points, curves
