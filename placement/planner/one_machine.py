"""AFD layouts whose nodes are processes of one machine: they wait for its cores, and the gateway works there too.

The closed form gives every node hardware of its own. Here the stage times of a calibration are played over so many
cores (`cores.py`), longer where another core is busy by as much as the calibration measured. What its own served
runs took over that play is taken over to all layouts of their kind: those with a core for every busy node, and those
with more busy nodes than cores, either of experts or of attention. An attention node without work beside them makes
every call of the experts longer by what one request's layer took longer with such a node. One attention node with one
micro-batch takes a step in one native call; where that was measured, its stages and runs are others than those of
layers that are sent one by one. Values in, values out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from afserve.placement.planner.cores import CoreStages, step_seconds
from afserve.placement.planner.perf.calibration_served import bend_through
from afserve.placement.planner.perf.curve import Curve, CurveSet
from afserve.placement.planner.perf.halves import expert_half
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import afd_stages
from afserve.placement.planner.perf.workload import fixed_context

ALONE, EXPERTS, ATTENTION, IDLE = (
    "a core each",
    "more expert nodes",
    "more attention nodes",
    "an idle node more",
)


@dataclass(frozen=True, slots=True)
class Processes:
    """Nodes of one machine that decode `requests` together. A batch smaller than all micro-batches fills only some.
    prefill: nodes that only compute prompts, which have no work meanwhile."""

    attention: int
    experts: int
    micro_batches: int
    requests: float
    prefill: int = 0

    @property
    def ranks(self) -> int:
        """Attention nodes that have something to do."""
        return int(max(1, min(self.attention, self.requests)))

    @property
    def filled(self) -> int:
        """Micro-batches of each of them."""
        return int(max(1, min(self.micro_batches, self.requests // self.ranks)))

    @property
    def alone(self) -> bool:
        """Whether one micro-batch of one node is all that there is."""
        return self.ranks * self.filled == 1

    def crowd(self, cores: int) -> str:
        """One micro-batch is either with the attention node or with the expert nodes."""
        busy = self.experts if self.alone else self.ranks + self.experts
        if busy > cores:
            return ATTENTION if self.ranks > 1 else EXPERTS
        idle = self.attention - self.ranks + self.prefill
        return IDLE if idle and self.ranks + idle + self.experts > cores else ALONE


class OneMachine:
    """A machine with `cores`, of which `setting` has a calibration; each node has one compute thread."""

    def __init__(self, setting: Setting, chip: Hardware, cores: int) -> None:
        own = setting.curves
        alone = _stages_of(own)
        alone.whole = None if own.whole is None else _stages_of(own.whole)
        self._setting, self._chip, self.cores = replace(setting, curves=alone, reached=None), chip, cores
        self._longer: dict[tuple[str, bool], Curve] = {}
        self._idle = 0.0
        ratios: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for kind, nodes, run in self._runs(own):
            if kind != IDLE:
                ratio = run["seconds"] / self.tpot(nodes, run["context"])
                ratios.setdefault((kind, self._in_one_call(nodes)), []).append(
                    (run["requests"] / nodes.ranks, ratio)
                )
        self._longer = {
            kind: Curve(0.0, 1.0, 1.0, bend=bend_through(found)) for kind, found in ratios.items()
        }
        excess = [
            run["seconds"] - self.tpot(nodes, run["context"])
            for kind, nodes, run in self._runs(own)
            if kind == IDLE and run["requests"] == 1
        ]
        self._idle = max(median(excess), 0.0) if excess else 0.0

    def _runs(self, own: CurveSet) -> Iterator[tuple[str, Processes, Mapping[str, float]]]:
        for run in own.runs:
            micro_batches = int(run.get("micro_batches", 1))
            nodes = Processes(int(run["attention"]), int(run["experts"]), micro_batches, run["requests"])
            yield nodes.crowd(self.cores), nodes, run

    def tpot(self, nodes: Processes, context: float) -> float:
        """Seconds from a token of a request to its next, `context` tokens being cached of each."""
        setting = replace(self._setting, workload=fixed_context(context))
        each = nodes.requests / nodes.ranks / nodes.filled
        idle = self._idle if nodes.crowd(self.cores) == IDLE else 0.0
        return idle + self._served(nodes) * step_seconds(
            self._stages(setting, nodes, each),
            cores=self.cores,
            ranks=nodes.ranks,
            expert_nodes=nodes.experts,
            micro_batches=nodes.filled,
            layers=setting.shape.experts.layers,
        )

    def _in_one_call(self, nodes: Processes) -> bool:
        return nodes.alone and self._setting.curves.whole is not None

    def _served(self, nodes: Processes) -> float:
        """What served runs took over their play; of a kind that never ran, those that are most alike."""
        kind, whole = nodes.crowd(self.cores), self._in_one_call(nodes)
        kinds = (kind, EXPERTS, ALONE) if kind == ATTENTION else (kind, ALONE)
        alike = [(one, whole) for one in kinds] + [(one, not whole) for one in kinds]
        known = next((self._longer[one] for one in alike if one in self._longer), None)
        if known is None:
            return 1.0
        return float(np.asarray(known.bent(np.array([nodes.requests / nodes.ranks])))[0])

    def _stages(self, setting: Setting, nodes: Processes, each: float) -> CoreStages:
        """`each`: requests of a micro-batch."""
        setting = setting.in_one_call if nodes.alone else setting
        chip, curves, experts = self._chip, setting.curves.curves, nodes.experts
        devices, batch = np.array([float(experts)]), np.array([each])
        alone = afd_stages(setting, chip, chip, 1, nodes.filled, np.ones(1), devices, batch)
        here = batch * setting.targets(devices) / devices

        def calls(*, by_chance: bool) -> list[float]:
            """Of one expert node, by the messages that it computes together: the fullest node, or the mean."""
            found = []
            for messages in range(1, nodes.ranks * nodes.filled + 1):
                half = expert_half(setting, chip, messages * batch, devices, by_chance=by_chance)
                own = setting.exchange_at_experts(here, np.array([float(messages)]))
                found.append(float((half + own)[0]))
            return found

        most, mean = calls(by_chance=True), calls(by_chance=False)
        others = [
            (experts * one - full) / (experts - 1)
            for one, full in zip(mean, most, strict=True)
            if experts > 1
        ]
        return CoreStages(
            attention=float(alone.attention[0]),
            outside=float(alone.outside[0]),
            experts=most,
            others=others,
            dispatch=float(alone.dispatch[0]),
            combine=float(alone.combine[0]),
            gateway=float(curves["gateway"].launch + each * curves["gateway"].per_group),
            attention_beside=_beside(curves, "attention"),
            experts_beside=_beside(curves, "experts"),
        )


def _stages_of(curves: CurveSet) -> CurveSet:
    """Without what served runs took over the closed form."""
    stages = {name: curve for name, curve in curves.curves.items() if name != "served_apart"}
    return CurveSet(curves.name, stages, curves.model_spread)


def _beside(curves: Mapping[str, Curve], stage: str) -> float:
    """How many times as long a stage takes while another core is busy; 1 where that was not measured."""
    curve = curves.get(f"{stage}_beside")
    return 1.0 if curve is None else float(np.asarray(curve.bent(np.ones(1)))[0])
