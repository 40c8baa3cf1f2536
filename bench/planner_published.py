"""Published relations the planner is held against: Step-3's cost table and MegaScale-Infer's rules.

Measured systems are judged through the command line (`planner_typed.py`)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from afserve.cli.plan.catalog import load_curves, load_hardware, load_model
from afserve.placement.pipeline import StageTimes
from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import afd_stages
from afserve.placement.planner.perf.workload import fixed_context
from bench.planner_theory import theoretical_cost

TABLE_CHIPS = ("h800", "h20", "a800", "910b")
TABLE = {
    "deepseek-v3": ((0.054, 0.128, 0.114, 0.113), (0.197, 0.460, 0.409, 0.407), (0.014, 0.036, 0.032, 0.032)),
    "kimi-k2": ((0.051, 0.065, 0.057, 0.057), (0.194, 0.231, 0.205, 0.204), (0.014, 0.036, 0.032, 0.032)),
    "qwen3-235b-a22b": (
        (0.135, 0.054, 0.091, 0.101),
        (0.527, 0.185, 0.338, 0.376),
        (0.008, 0.021, 0.019, 0.019),
    ),
    "step-3": ((0.048, 0.040, 0.040, 0.043), (0.176, 0.114, 0.120, 0.133), (0.015, 0.040, 0.036, 0.035)),
}
BEST = {"step-3": ("h20", "h800"), "deepseek-v3": ("h800", "h800"), "qwen3-235b-a22b": ("h20", "h800")}


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison; `limit` is the allowed relative error. `note` says what was assumed."""

    claim: str
    case: str
    published: float
    predicted: float
    limit: float
    note: str = ""
    counted: bool = True

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def passed(self) -> bool:
        return abs(self.error) <= self.limit + 1e-9


def step3_table() -> Iterator[Check]:
    """48 cells, to 3 % or to the rounding of the printed three decimals where that is coarser."""
    chips = [load_hardware(name) for name in TABLE_CHIPS]
    for model, printed in TABLE.items():
        shape = load_model(model)
        for (label, context), row in zip(
            (("attention 8K", 8192), ("attention 32K", 32768), ("FFN", 8192)), printed
        ):
            for chip, cell in zip(chips, row):
                cost = theoretical_cost(shape, chip, context)
                value = cost.experts if label == "FFN" else cost.attention
                yield Check(
                    "step3 table", f"{model} {label} {chip.name}", cell, value, max(0.03, 0.0005 / cell)
                )
        if model in BEST:
            yield _conclusion(model, chips)


def _conclusion(model: str, chips: list) -> Check:
    """1 when the cheapest chip for each half is the paper's, at 8K and at 32K."""
    found = []
    for context in (8192, 32768):
        costs = {chip.name: theoretical_cost(load_model(model), chip, context) for chip in chips}
        attention = min(costs, key=lambda name: round(costs[name].attention, 3))
        found.append((attention, min(costs, key=lambda name: round(costs[name].experts, 3))))
    right = all(pair == BEST[model] for pair in found)
    kind = "EP" if BEST[model][0] == BEST[model][1] else "AFD"
    note = f"attention {BEST[model][0]}, FFN {BEST[model][1]}: {kind}"
    return Check("step3 table", f"{model} best hardware", 1.0, float(right), 0.0, note)


def megascale() -> Iterator[Check]:
    """m from T_c / T_f, what a further micro-batch brings, and the balance of n_a."""
    for ratio, wanted in ((0.1, 3), (0.38, 3), (0.5, 3), (0.6, 4), (0.99, 4)):
        stages = StageTimes(1.0, 1.0, ratio, ratio)
        yield Check("megascale", f"least m at T_c = {ratio} T_f", wanted, stages.minimum_micro_batches(), 0.0)
    for ratio, low in ((0.1, 1.1), (0.38, 1.38)):
        stages = StageTimes(1.0, 1.0, ratio, ratio)
        gain = 3 / stages.period(3) / (2 / stages.period(2))
        yield Check("megascale", f"m 2 -> 3 at T_c = {ratio} T_f", low, gain, 0.05)
    stages = StageTimes(1.0, 1.0, 0.2, 0.2)
    yield Check(
        "megascale",
        "m 1 -> 2",
        1.9,
        2 / stages.period(2) * stages.period(1),
        0.10,
        "closed form: 2 until full",
    )
    yield _balance()


def _balance() -> Check:
    """Best number of one-device attention nodes by search against n_a = k1 E / (k3 K), the slopes of both stages."""
    chip, shape = load_hardware("a800"), load_model("mixtral-8x22b")
    setting = Setting(
        shape, load_curves("h200"), fixed_context(4096), Precision("bf16", "bf16", "bf16"), Routing(0.0)
    )
    nodes = np.arange(1.0, 65.0)
    few, many = (
        afd_stages(setting, chip, chip, 1, 3, nodes, 0 * nodes + 8, 0 * nodes + b) for b in (512.0, 1024.0)
    )
    slope = (many.attention - few.attention) / 512
    per_request = (many.experts - few.experts) / 512 / nodes
    formula = float((slope / per_request)[15])
    speed = 3 * 1024 * nodes / many.iteration / (nodes + 8)
    best = float(nodes[np.argmax(speed)])
    return Check("megascale", "attention nodes at balance", formula, best, 0.25, "search against the formula")
