"""The question `afserve plan` answers: which deployment is best, what comes next, and does disaggregation pay.

Searches every family, ranks by the objective and keeps the best of each kind. `verdict.py` puts it into words,
`infeasible.py` says what failed when nothing fits. Pure: values in, values out.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.batches import best_batches
from afserve.placement.planner.perf.drafting import Drafts
from afserve.placement.planner.perf.engine import Engine
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.plan import Plan, plan_of
from afserve.placement.planner.score import cost_of, score_of
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

if TYPE_CHECKING:
    from afserve.placement.planner.one_machine import OneMachine

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
    machine: "OneMachine | None" = None
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

    def started(self) -> "Question":
        """The same of nodes that `afserve up` starts: with its share of memory, at the speed of these engines."""

        def own(engines: tuple[tuple[str, Engine], ...]) -> tuple[tuple[str, Engine], ...]:
            return tuple((kind, replace(engine, own=True)) for kind, engine in engines)

        return replace(self, engines=own(self.engines), others=own(self.others))

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


@dataclass(frozen=True, slots=True, eq=False)
class PlanCandidate:
    """The best layout of a family. score: lower is better; tpot: seconds; slow: too slow to be useful, where nobody
    said how fast; build: its plan, which takes longer than finding it."""

    score: float
    tpot: float
    slow: bool
    build: Callable[[], Plan]

    def ranked(self) -> tuple[tuple[bool, float, float], Plan]:
        plan = self.build()
        return (self.slow, self.score, plan.usd_per_mtok), plan


@dataclass(frozen=True, slots=True)
class KindPlans:
    """What was found of one kind of deployment, and how many layouts were tried."""

    found: tuple[PlanCandidate, ...]
    tried: int

    def best(self) -> Plan | None:
        """Only plans as good as the best are built."""
        least = min(((one.slow, one.score) for one in self.found), default=None)
        return ranked(
            [replace(self, found=tuple(c for c in self.found if (c.slow, c.score) == least))]
        ).best()


def answer(question: Question) -> RankedPlans:
    """Empty `plans` when no deployment meets the targets in these pools."""
    return ranked(plans_of_kind(question, kind) for kind in KINDS if kind in question.kinds)


def ranked(parts: Iterable[KindPlans]) -> RankedPlans:
    """The plans of several kinds together."""
    kept = tuple(parts)
    found = sorted((one.ranked() for part in kept for one in part.found), key=itemgetter(0))
    return RankedPlans(tuple(plan for _, plan in found), sum(part.tried for part in kept))


def plans_of_kind(question: Question, kind: str) -> KindPlans:
    """They depend on the engine of that kind, and on no other one."""
    found: list[PlanCandidate] = []
    tried = 0
    found_all = families(
        list(question.pools), question.micro_batches, (kind,), question.layout, question.prompts
    )
    for family in filter(question.runs, found_all):
        tried += len(family.ranks)
        best = _best_drafted(family, question)
        if question.machine is not None and kind == "afd":
            machine = question.machine
            best = [there for one in best if (there := _on_one_machine(question, machine, one)) is not None]
        found += best
    return KindPlans(tuple(found), tried)


_FIRST_TRIED = (0, 1, 2, 4, 8)
"""Drafted tokens, then the neighbours of the best."""


def _best_drafted(family: PlanFamily, question: Question) -> list[PlanCandidate]:
    """With as many drafted tokens as score best, where those are not given. Of equals the fewest. One of each count of
    instances that decode."""
    if not question.draftable:
        return _best_of(family, question)
    found = (_drafted(one, question) for one in family.by_decoders())
    return [best for best in found if best is not None]


def _drafted(family: PlanFamily, question: Question) -> PlanCandidate | None:
    """Of a family with one count of instances that decode."""
    most, tried = len(question.draftable) - 1, dict[int, PlanCandidate | None]()

    def score(tokens: int) -> tuple[bool, float, int]:
        if tokens not in tried:
            tried[tokens] = next(
                iter(_best_of(family, question.with_drafts(question.draftable[tokens]))), None
            )
        found = tried[tokens]
        return (True, np.inf, tokens) if found is None else (found.slow, found.score, tokens)

    best = min((tokens for tokens in _FIRST_TRIED if tokens <= most), key=score)
    low, high = (best + 1) // 2, 2 * best
    best = min((tokens for tokens in range(low, min(high, most) + 1)), key=score)
    return tried[best]


def _on_one_machine(question: Question, machine: "OneMachine", found: PlanCandidate) -> PlanCandidate | None:
    """The same layout as processes of one machine; None where it is too slow then. Scores are per token. First tokens
    are not told: prompts are not played."""
    from afserve.placement.planner.one_machine import Processes

    plan, prefill = found.build(), question.setting.prefill
    requests = min(question.setting.concurrency, float(plan.requests))
    idle = round(max(prefill.devices, 1) * prefill.workers) if prefill else 0
    nodes = Processes(plan.ranks, plan.experts.devices, plan.micro_batches, requests, idle)
    tpot = machine.tpot(nodes, question.setting.workload.context_mean)
    if tpot > question.targets.tpot:
        return None
    there = replace(plan, tpot=tpot, tok_s=requests / tpot, decode_only=True)
    return PlanCandidate(found.score * tpot / plan.tpot, tpot, _slow(question, tpot), lambda: there)


def _slow(question: Question, tpot: float) -> bool:
    return question.floored and tpot > USEFUL * (1 + 1e-9)


def _best_of(family: PlanFamily, question: Question) -> list[PlanCandidate]:
    """Of each count of instances that decode the best: fast enough to be useful where nobody said how fast; where none
    is, the best without that floor."""
    if not question.floored:
        return list(_best_inside(family, question, question.targets, "SLO").values())
    floor = replace(question.targets, tpot=USEFUL)
    found = _best_inside(family, question, floor, "usefulness")
    for one in family.by_decoders():
        if one.decoders not in found:
            found |= _best_inside(one, question, question.targets, "SLO")
    return [found[count] for count in sorted(found)]


def _best_inside(
    family: PlanFamily, question: Question, targets: Targets, limit_name: str
) -> dict[int, PlanCandidate]:
    """By the count of instances that decode, those that have one."""
    setting = question.setting_for(family.kind)
    capped = question.tokens_per_second or setting.concurrency
    family = family.with_reads(setting)
    cost = None if capped else cost_of(family, question.objective)
    soonest = question.objective == "latency" and not question.tokens_per_second  # one request at a time
    running = 1 if soonest else question.layout.running
    cells = best_batches(family, setting, targets, cost, running)
    kept, batch, limit = cells.family, cells.low, cells.limit
    if not len(batch):
        return {}
    score, instances = score_of(
        cells, question.objective, setting.concurrency, question.tokens_per_second, question.pools
    )
    found = {}
    for count in np.unique(kept.decoders):
        mine = np.flatnonzero(np.broadcast_to(kept.decoders == count, batch.shape))
        index = int(mine[np.argmin(score[mine])])
        if np.isfinite(score[index]):
            tpot = float(cells.tpot[index])
            best = _Best(kept, index, float(batch[index]), float(limit[index]), int(instances[index]))
            build = partial(_built, best, question, setting, "objective" if soonest else limit_name)
            found[int(count)] = PlanCandidate(float(score[index]), tpot, _slow(question, tpot), build)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Best:
    """Layout `index` of a family at a batch, of `most` that there is room for."""

    family: PlanFamily
    index: int
    batch: float
    most: float
    instances: int


def _built(best: _Best, question: Question, setting: Setting, limit_name: str) -> Plan:
    """`limit_name`: what keeps a batch below its limit, or `objective`."""
    limited_by = limit_name
    if limit_name != "objective" and best.batch >= best.most:
        limited_by = _full(setting, best.family, best.most, best.index)
    elif limit_name != "objective" and not _read(best.family, setting, best.index, best.batch + 1):
        limited_by = "readers"
    places = best.most if limited_by == "readers" else best.batch
    plan = plan_of(best.family, setting, best.index, best.batch, places, limited_by)
    return replace(plan, instances=best.instances)


def _full(setting: Setting, family: PlanFamily, most: float, index: int) -> str:
    """What keeps a batch at its limit: as many requests as clients keep in flight, memory, or the search's own end."""
    if setting.concurrency and most * family.ranks[index] * family.micro_batches >= setting.concurrency:
        return "requests"
    return "memory" if most < BATCH_LIMIT else "search"


def _read(family: PlanFamily, setting: Setting, index: int, batch: float) -> bool:
    """Whether readers bring so many requests to decode in layout `index`."""
    if setting.prefill is None or not setting.concurrency:
        return True
    one = family.subset(np.arange(len(family.ranks)) == index)
    tpot = one.stages(setting, np.array([batch])).tpot
    return bool(one.decodes(setting, np.array([batch]), tpot)[0])


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
