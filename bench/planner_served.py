"""Measured end-to-end times of engines, as questions to the planner: what `engine_fit.py` fits and benches judge.

A row is one configuration under a fixed number of requests in flight, or of requests that all hold a context. It opens
no files and knows no times but those of the row.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.curve import CurveSet
from afserve.placement.planner.perf.drafting import NO_DRAFTS, Drafts
from afserve.placement.planner.perf.engine import PLAIN, Engine
from afserve.placement.planner.perf.engine_rows import Like
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.setting import PrefillSetting, Setting
from afserve.placement.planner.perf.shape import ModelShape
from afserve.placement.planner.perf.stages import Stages
from afserve.placement.planner.perf.workload import Lengths, fixed_context, from_lengths
from afserve.placement.planner.search import PlanFamily

Array = NDArray[np.float64]
FULL_READERS = 0.6
"""Of the requests in flight: where fewer decode, readers are full; else the wait is for the prompts in front."""
SKEW = 0.4
"""Of the experts' popularity where a row's source does not say it, as `afserve plan` takes it."""


@dataclass(frozen=True, slots=True)
class ServedRow:
    """`devices` of one instance (attention devices where `expert_devices` is not 0); data_parallel: attention is
    replicated, not split. disaggregated: prompts elsewhere. concurrency is per decode worker. tpot, ttft in seconds as
    measured, ttft 0 where unknown. answer 0: every cache holds `prompt` tokens. series: everything but the concurrency.
    release: the engine's version. day: when it was measured. limit: requests an engine was configured to decode at
    once, infinite where unknown. skew: of the experts' popularity, 0 where the source routed evenly. drafts: as it was
    served, so that rows with drafts are explained by what drafts cost and yield; a row whose source does not say has
    none.
    """

    name: str
    shape: ModelShape
    chip: Hardware
    engine: str
    weights: str
    experts: str
    kv: str
    devices: int
    data_parallel: bool
    expert_parallel: bool
    concurrency: float
    prompt: float
    answer: float
    tpot: float
    ttft: float
    series: str
    release: str = ""
    day: str = ""
    disaggregated: bool = False
    prefill_devices: int = 0
    prefill_workers: float = 1
    decode_workers: float = 1
    limit: float = float("inf")
    expert_devices: int = 0
    micro_batches: int = 1
    skew: float = SKEW
    drafts: Drafts = NO_DRAFTS

    @property
    def total_devices(self) -> int:
        return self.devices + self.expert_devices

    @property
    def family(self) -> PlanFamily:
        """The one layout that was measured."""
        kind = "afd" if self.expert_devices else "colocated"
        replicated = self.data_parallel or bool(self.expert_devices)
        split, ranks = (1, self.devices) if replicated else (self.devices, 1)
        return PlanFamily(
            kind,
            self.chip,
            self.chip,
            split,
            self.micro_batches,
            np.array([float(ranks)]),
            np.array([float(self.expert_devices)]),
        )

    def setting(self, curves: CurveSet, engine: Engine = PLAIN) -> Setting:
        work = (
            from_lengths(Lengths(self.prompt), Lengths(self.answer), decode_only=self.disaggregated)
            if self.answer
            else fixed_context(self.prompt)
        )
        asked = Setting(
            self.shape,
            curves,
            work,
            Precision(self.weights, self.experts, self.kv),
            Routing(self.skew),
            drafts=self.drafts,
            split_experts=not self.expert_parallel and not self.expert_devices,
            concurrency=self.concurrency,
            prefill=PrefillSetting(self.prefill_devices, self.prefill_workers / self.decode_workers)
            if self.disaggregated and self.prefill_devices
            else None,
        )
        return asked.served_by(engine)

    @property
    def decoded(self) -> float:
        """Requests in decode at once, as measured: who waits for devices that read prompts is not (Little's law)."""
        if not self.disaggregated or not self.ttft or not self.answer:
            return self.concurrency
        decode = self.answer * self.tpot
        share = decode / (self.ttft + decode)
        return self.concurrency * (share if share < FULL_READERS else 1.0)

    def places(self, setting: Setting) -> Array:
        """Requests per rank and micro-batch for which there is room; 0 where the weights do not fit, so that what the
        row says is wrong."""
        return self._each(self.concurrency, setting)

    def batch(self, setting: Setting) -> Array:
        """Of those, the ones in decode."""
        return self._each(self.decoded, setting)

    def _each(self, requests: float, setting: Setting) -> Array:
        family = self.family
        room = family.batch_limit(setting)
        held = min(requests, self.limit)
        return np.asarray(np.minimum(np.ceil(held / (family.ranks * family.micro_batches)), room))

    def stages(self, setting: Setting) -> Stages:
        return self.family.stages(setting, self.batch(setting))

    def like(self, setting: Setting) -> Like:
        layout = "afd" if self.expert_devices else setting.colocated(float(self.family.ranks[0]))
        like = setting.like(self.chip, layout)
        return replace(like, drafts=self.drafts.drafter.name)
