"""An engine as the planner sees it: how much longer than bare kernels it takes, and what was measured of it.

Rates multiply parts of the shared physics (`stages.py`), one per part. What rates cannot say is learned from the
measured rows that are most like the question (`engine_rows.py`). A profile is a value; `engine_file.py` reads it, and
benches fit and write it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.curve import Curve, CurveSet, of_isa
from afserve.placement.planner.perf.engine_rows import Like, MeasuredRows, like_grid

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of an engine over seconds of the bare kernels, by part; 1 is the kernels themselves.

    layer: what every layer takes whatever its size. core: attention over the cache. gemm: projections, dense FFNs and
    the head. reduce: all-reduces. experts: their weights and products; active: what each active expert takes. exchange:
    rows between devices. width: 10 us per exchange and doubling of its devices. step, request: per step, and per
    request in it. prompt_attention, prompt_experts: prompts that are read between steps.
    """

    layer: float = 1.0
    core: float = 1.0
    gemm: float = 1.0
    reduce: float = 1.0
    experts: float = 1.0
    active: float = 1.0
    exchange: float = 1.0
    width: float = 0.0
    step: float = 1.0
    request: float = 1.0
    prompt_attention: float = 1.0
    prompt_experts: float = 1.0


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait for a first token where clients keep a fixed number of requests in flight, see `first_token.py`.

    attention, experts: seconds of a prompt over its kernels. start: seconds before it is scheduled. queued: prompts in
    front of it, per running request to the `power`. steps: steps that end first. request: 0.1 ms per running request.
    """

    attention: float = 1.0
    experts: float = 1.0
    start: float = 0.02
    queued: float = 0.1
    steps: float = 1.0
    request: float = 0.2
    power: float = 0.9


WIDTH_SECONDS = 10e-6
NO_ROWS = MeasuredRows()
PLAIN_ERROR = 0.3
_MOST_LOG = math.log(1e3)


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """kinds: what it runs (colocated, afd); against: the engine of the other kind it is compared with by default.

    steps_ahead, shared_on_experts, exchange_kernels, balances_kv, broadcasts: how it works, as in `perf.Setting`.
    own: it is this project's, whose nodes share their memory out as `afserve up` does (`node_room`, `kv_blocks`).
    parallel, micro_batches: degrees of tensor parallelism, and micro-batches in flight, that it runs. memory: share of
    a device's memory for weights and caches. factors: by label ("chip h200", "model
    glm-5", "experts fp4"). rows: what it was fitted to. fit: how many rows and series, and the median error of series
    it had not seen.
    """

    name: str
    about: str = ""
    kinds: tuple[str, ...] = ("colocated", "afd")
    against: str = ""
    steps_ahead: bool = False
    shared_on_experts: bool = False
    exchange_kernels: bool = True
    balances_kv: bool = False
    broadcasts: bool = False
    own: bool = False
    parallel: tuple[int, ...] = (1, 2, 4, 8)
    micro_batches: tuple[int, ...] = (1, 2, 3, 4)
    memory: float = 0.90
    rates: Rates = Rates()
    wait: Wait = Wait()
    factors: Mapping[str, float] = field(default_factory=dict)
    wait_factors: Mapping[str, float] = field(default_factory=dict)
    rows: MeasuredRows = NO_ROWS
    fit: Mapping[str, object] = field(default_factory=dict)
    source: str = ""

    @property
    def measured(self) -> bool:
        """Whether rows of this engine are known; without any its error is a calibration's, or a guess."""
        return len(self.rows.tpot) > 0

    def labelled(self, like: Like) -> float:
        """The product of the factors that the question's labels have."""
        return float(np.prod([self.factors.get(label, 1.0) for label in like.labels]))

    def factor(self, like: Like, requests: Array, devices: Array) -> Array:
        """What the physics' seconds per token are multiplied by, for so many requests on so many devices."""
        if not self.measured and not self.factors:
            return np.ones(np.broadcast_shapes(np.shape(requests), np.shape(devices)))
        return np.asarray(
            self.labelled(like) * _factor(like_grid(self.rows, like, "tpot")(requests, devices))
        )

    def wait_factor(self, like: Like, requests: Array, devices: Array) -> Array:
        """The same for the first token under a fixed number of requests."""
        named = float(np.prod([self.wait_factors.get(label, 1.0) for label in like.labels]))
        return np.asarray(named * _factor(like_grid(self.rows, like, "ttft")(requests, devices)))

    def half_width(self, like: Like, requests: float, devices: float) -> float:
        """Half of the 80 % interval of log TPOT, from the errors of the rows most like this one."""
        found = self.rows.half_width(like, requests, devices) if self.measured else 1.2816 * PLAIN_ERROR
        return min(found, _MOST_LOG)


def _factor(log: Array) -> Array:
    """Seconds are multiplied by a thousand at most: rows that ask for more are none of an engine."""
    return np.asarray(np.exp(np.minimum(np.maximum(log, -_MOST_LOG), _MOST_LOG)))


PLAIN = Engine("afserve", about="bare kernels: nothing is known of an engine", own=True)


@lru_cache(maxsize=64)
def scaled(curves: CurveSet, rates: Rates) -> CurveSet:
    """The curves of decoding as an engine reaches them. Prompts keep the kernels' own, and so do experts on a CPU: no
    engine's rows are about them."""
    found = {
        name: curve if of_isa(name) else _scaled(name, curve, rates) for name, curve in curves.curves.items()
    }
    return CurveSet(curves.name, found, curves.model_spread, curves.checked, curves.most)


def _scaled(name: str, curve: Curve, rates: Rates) -> Curve:
    operation = name.split(".", maxsplit=1)[0]
    if operation == "experts":
        return replace(
            curve,
            launch=curve.launch * rates.layer,
            per_group=curve.per_group * rates.active,
            scale=rates.experts,
        )
    if operation == "step":
        return replace(curve, launch=curve.launch * rates.step, per_group=curve.per_group * rates.request)
    if operation == "attention_layer":
        return replace(curve, launch=curve.launch * rates.layer)
    scales = {
        "core": rates.core,
        "gemm": rates.gemm,
        "allreduce": rates.reduce,
        "fast_link": rates.exchange,
        "network": rates.exchange,
    }
    return replace(curve, scale=scales[operation]) if operation in scales else curve
