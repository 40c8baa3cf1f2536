"""What a prediction is asked for, besides the layout: the model, its requests, how the engine works, what was measured.

It is a value; `stages.py` makes stage times of it.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.curve import CurveSet
from afserve.placement.planner.perf.drafting import NO_DRAFTS, Drafts, alone, with_drafter
from afserve.placement.planner.perf.engine import PLAIN, Engine, scaled
from afserve.placement.planner.perf.engine_rows import OFF, Like
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.ffn import distinct_targets
from afserve.placement.planner.perf.found import Found
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.kv import cache_bytes, kernel_bytes
from afserve.placement.planner.perf.shape import ModelShape
from afserve.placement.planner.perf.workload import Workload

Array = NDArray[np.float64]
DEFAULT_PRECISION = Precision()
EVEN = Routing()
NOTHING_FOUND = Found()


@dataclass(frozen=True, slots=True)
class PrefillSetting:
    """Where prompts are read when they are read elsewhere: devices per instance (0: as many as an instance of decoding
    has) of the same hardware, and how many instances there are for each instance of decoding."""

    devices: int = 0
    workers: float = 1.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything a prediction depends on besides the layout.

    drafts: what each sequence drafts in a step, and how many tokens the step yields.
    shared_on_experts: AFD systems that keep shared experts and dense FFNs on the expert nodes (Step-3):
        their dense layers take turns in the ping-pong like the others.
    exchange_kernels: devices run the send and receive kernels themselves (False: a host CPU drives the NIC, StepMesh).
    steps_ahead: scheduling and sampling of the next step hide behind this one (FastAFD; device-time measurements).
    balances_kv: whoever places requests evens out cached tokens over the ranks, so that lengths which vary make none
        slower than the mean (DeepSeek); else they come to ranks at random.
    broadcasts: every row goes to every expert host of AFD, whose devices give it to each other (StepMesh).
    percentile99: the slowest rank's sum of lengths and the prompts that a request meets are taken at their 99th
        percentile instead of their mean, and stages jitter.
    engine: how much longer than its kernels it takes; `reached` are the curves that its decoding reaches.
    split_experts: each expert device of AFD has a slice of every expert (else some experts whole), and so has each
        colocated device where one rank spans all of them.
    concurrency: requests that clients keep in flight, 0 where they come at random. prefill: who reads their prompts.
    found: KV of prompts that lies in a cache or a tier below it. ttft: seconds to the first token for which devices
        that only read prompts share one; without it they never do.
    """

    shape: ModelShape
    curves: CurveSet
    workload: Workload
    precision: Precision = DEFAULT_PRECISION
    routing: Routing = EVEN
    drafts: Drafts = NO_DRAFTS
    shared_on_experts: bool = False
    exchange_kernels: bool = True
    steps_ahead: bool = False
    balances_kv: bool = False
    broadcasts: bool = False
    percentile99: bool = False
    engine: Engine = PLAIN
    reached: CurveSet | None = None
    split_experts: bool = False
    concurrency: float = 0.0
    prefill: PrefillSetting | None = None
    found: Found = NOTHING_FOUND
    ttft: float = float("inf")

    def served_by(self, engine: Engine) -> "Setting":
        """The same question, answered for `engine`: its way of working, and the curves that it reaches."""
        return replace(
            self,
            engine=engine,
            reached=scaled(self.curves, engine.rates),
            steps_ahead=engine.steps_ahead,
            shared_on_experts=engine.shared_on_experts,
            exchange_kernels=engine.exchange_kernels,
            balances_kv=engine.balances_kv,
            broadcasts=engine.broadcasts,
        )

    @property
    def in_one_call(self) -> "Setting":
        """Of decode steps that are one native call; this setting where those were not measured."""
        whole = self.curves.whole
        if whole is None:
            return self
        reached = None if self.reached is None else scaled(whole, self.engine.rates)
        return replace(self, curves=whole, reached=reached)

    @property
    def never_split(self) -> "Setting":
        """The same where each prompt is read by one device, however late."""
        return replace(self, ttft=float("inf"))

    @property
    def held(self) -> ModelShape:
        """The model and its drafter: what memory holds and what prompts pass."""
        return with_drafter(self.shape, self.drafts.drafter)

    def kernel_bytes(self, chip: Hardware) -> int:
        """What attention, which takes none of a CPU, and an encoder take of such a device beside weights and caches."""
        seeing = self.held.encoder.scratch_bytes(2) if self.held.encoder else 0
        return seeing + (kernel_bytes(self.held) if self.engine.own and not chip.isa else 0)

    def drafter_pass(self, rows: int) -> "Setting":
        """The drafter as a model of its own, in a pass with so many rows of each sequence; it is part of a step."""
        again = replace(NO_DRAFTS, tokens=rows - 1)
        return replace(self, shape=alone(self.shape, self.drafts.drafter), drafts=again, steps_ahead=True)

    @property
    def decode_curves(self) -> CurveSet:
        return self.curves if self.reached is None else self.reached

    def like(self, chip: Hardware, layout: str) -> Like:
        """What measured rows are compared with; a decode-only context counts as one with answers of 1,024 tokens. Where
        no row has drafts, what rows say of an engine holds with drafts too."""
        work = self.workload
        return Like(
            model=self.shape.rows_name,
            chip=chip.rows_name,
            experts=self.precision.experts,
            layout=layout,
            prompts="elsewhere" if work.decode_only else "here",
            prompt=max(work.mean_prompt, 1.0),
            answer=work.mean_answer if work.mean_answer > 1 else 1024.0,
            drafts=self.drafts.drafter.name if self.engine.rows.drafted else OFF,
        )

    def colocated(self, ranks: float) -> str:
        """The layout of colocated devices as measured rows name it: one rank over all of them, or several with
        attention of their own; and experts in slices on every device, or whole on some."""
        if ranks > 1:
            return "dp tp" if self.split_experts else "dp"
        return "tp" if self.split_experts else "tp ep"

    @property
    def tokens_per_step(self) -> float:
        return self.drafts.length

    @property
    def fetching(self) -> float:
        """Seconds until the KV that is found of a prompt is in the memory of the rank that reads it."""
        if self.workload.decode_only:
            return 0.0
        return self.found.fetch_seconds(cache_bytes(self.held, self.precision, self.workload.mean_prompt))

    @property
    def rows_per_request(self) -> float:
        return float(self.drafts.rows)

    @property
    def to_all(self) -> bool:
        """Whether a row of AFD goes to all expert devices: each has a slice of every expert, or all get all rows."""
        return self.split_experts or self.broadcasts

    def targets(self, holders: Array) -> Array:
        """To how many of these expert devices (or nodes) of AFD a row goes."""
        return holders if self.to_all else distinct_targets(self.shape.experts.top_k, holders)

    @property
    def exchange(self) -> float:
        """Device seconds of one send or receive kernel, whatever its size."""
        return self.decode_curves.pick("exchange", "bf16").launch if self.exchange_kernels else 0.0

    def exchange_at_attention(self, rows: Array, nodes: Array) -> Array:
        """Device seconds of one layer's send and receive: `rows` rows, each to those of `nodes` that need it."""
        kernel = self.decode_curves.pick("exchange", "bf16")
        seconds = np.asarray(2 * self.exchange + 0.0 * (rows + nodes))
        if not self.exchange_kernels or not (kernel.per_row or kernel.per_group):
            return seconds
        copies = self.targets(nodes)
        return seconds + 2 * (kernel.per_row * rows * copies + kernel.per_group * (nodes - 1))

    def exchange_at_experts(self, rows: Array, messages: Array) -> Array:
        """The same on an expert device that answers `messages` of `rows` rows each. Where only kernels of a collective
        were measured, one send and one receive take what they take at the attention side, for any number of peers."""
        answer = self.decode_curves.curves.get("answer")
        if answer is None or not self.exchange_kernels:
            return np.asarray(2 * self.exchange + 0.0 * (rows + messages))
        return np.asarray(messages * (answer.launch + answer.per_row * rows))
