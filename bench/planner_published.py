"""Published numbers the planner is held against: Step-3's cost table and measured rows, DeepSeek's production figures,
FastAFD's speed-ups, MegaScale-Infer's relations. Each function returns rows (case, published, predicted, limit)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from afserve.cli.catalog import load_curves, load_hardware, load_model, read_lines
from afserve.pipeline import StageTimes
from afserve.placement.planner.perf import Setting, afd_stages, colocated_stages
from afserve.placement.planner.perf_attention import Precision
from afserve.placement.planner.perf_experts import Routing
from afserve.placement.planner.planner import Question, answer
from afserve.placement.planner.search import Pool, Targets
from afserve.placement.planner.theory import theoretical_cost
from afserve.placement.planner.trace_reader import read_trace
from afserve.placement.planner.workload import fixed_context

SKEW = Routing(0.4)
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


def step3_measured() -> Iterator[Check]:
    """6,144 requests in three micro-batches (throughput x TPOT of the report), StepMesh (no device time for transfers),
    shared and dense FFNs on the FFN side."""
    chip, curves, shape = load_hardware("h800"), load_curves("h200"), load_model("step-3")
    for name, context, ranks, width, devices, published in (
        ("2A2F 4K FP8, average", 4096, 16, "fp8", 32, 3910.0),
        ("2A2F 4K FP8, peak", 4096, 16, "fp8", 32, 4039.0),
        ("3A2F 4K bf16 attention", 4096, 24, "bf16", 40, 3321.0),
        ("4A2F 8K FP8", 8192, 32, "fp8", 48, 2643.0),
    ):
        setting = Setting(
            shape, curves, fixed_context(context), Precision(width, "fp8", width), SKEW,
            shared_on_experts=True, exchange_kernels=False,
        )  # fmt: skip
        stages = afd_stages(setting, chip, chip, 1, 3, _one(ranks), _one(16), _one(6144 / 3 / ranks))
        yield Check(
            "step3 measured", name, published, 6144 / float(stages.tpot[0]) / devices, 0.15, "tok/s/GPU"
        )


def deepseek(data: Path) -> Iterator[Check]:
    """bf16 cache as published. 2,324: EP128, 128 requests of 4K per GPU. 1,850: EP144 with 32 redundant experts, mean
    context 4,989, 21 tokens per second and request; lengths vary as in the two request traces."""
    chip = load_hardware("h800")
    setting = Setting(
        load_model("deepseek-v3"),
        load_curves("h200"),
        fixed_context(4096),
        Precision("fp8", "fp8", "bf16"),
        SKEW,
    )
    stages = colocated_stages(setting, chip, 1, 2, _one(128), _one(64))
    yield Check("deepseek", "2,324 tok/s/GPU, EP128 4K", 2324.0, 128 / float(stages.tpot[0]), 0.15)
    spread = {"equal lengths": 0.0} | _dispersions(data)
    for name, variation in spread.items():
        work = replace(fixed_context(4989), context_deviation=4989 * variation)
        real = replace(setting, workload=work, routing=Routing(0.4, redundant=32))
        batch = np.arange(8.0, 128.0)
        stages = colocated_stages(real, chip, 1, 2, np.full_like(batch, 144.0), batch)
        fits = stages.tpot <= 1 / 21
        speed = float((2 * batch / stages.tpot)[fits][-1])
        note = f"lengths vary by {variation:.2f} of their mean ({name})"
        yield Check(
            "deepseek", f"1,850 tok/s/GPU, EP144, {name}", 1850.0, speed, 0.15, note, name != "equal lengths"
        )


def _dispersions(data: Path) -> dict[str, float]:
    found = {}
    for label, file in (
        ("Azure trace", "AzureLLMInferenceTrace_conv.csv"),
        ("Mooncake trace", "mooncake_conversation_trace.jsonl"),
    ):
        path = data.parent / "request_traces" / file
        work = read_trace(file, read_lines(path, "trace"))
        found[label] = work.context_deviation / work.context_mean
    return found


FASTAFD = (
    ("Qwen3-235B 8K", "qwen3-235b-a22b", 8192, 28, 96, 64, 2518.0, 1781.0),
    ("Qwen3-235B 16K", "qwen3-235b-a22b", 16384, 44, 48, 32, 1377.0, 954.0),
    ("MiniMax-M2.5 8K", "minimax-m2", 8192, 68, 72, 48, 2198.0, 1516.0),
    ("MiniMax-M2.5 16K", "minimax-m2", 16384, 68, 36, 24, 1006.0, 745.0),
)


def fastafd() -> Iterator[Check]:
    """Layouts and batches as its public repository runs them: 4 FFN GPUs, two micro-batches, against vLLM DP=EP4 at the
    published batch; bf16 cache, device time (scheduling hidden)."""
    chip, curves = load_hardware("gb200"), load_curves("h200")
    for name, model, context, ranks, ours, theirs, afd_speed, vllm_speed in FASTAFD:
        setting = Setting(
            load_model(model),
            curves,
            fixed_context(context),
            Precision("fp8", "fp8", "bf16"),
            SKEW,
            steps_ahead=True,
        )
        afd = afd_stages(setting, chip, chip, 1, 2, _one(ranks), _one(4), _one(ours / 2))
        base = colocated_stages(setting, chip, 1, 1, _one(4), _one(theirs))
        speed, baseline = ours * ranks / (ranks + 4) / float(afd.tpot[0]), theirs / float(base.tpot[0])
        yield Check("fastafd", f"{name} speed-up", afd_speed / vllm_speed, speed / baseline, 0.10)
        yield Check("fastafd absolute", f"{name} AFD tok/s/GPU", afd_speed, speed, 0.15)
        yield Check("fastafd absolute", f"{name} vLLM EP4 tok/s/GPU", vllm_speed, baseline, 0.15)


WIDE = {
    "Qwen3-235B 8K": ((8, 88, 2271.76), (16, 96, 2331.65), (32, 101, 2304.92)),
    "Qwen3-235B 16K": ((8, 44, 1094.29), (16, 48, 1204.08), (32, 50, 1164.91)),
    "MiniMax-M2.5 8K": ((8, 68, 1991.72), (16, 74, 2218.89), (32, 78, 2162.36)),
    "MiniMax-M2.5 16K": ((8, 34, 1027.35), (16, 37, 1118.73), (32, 39, 1051.05)),
}


def wide_ep() -> Iterator[Check]:
    """Wider vLLM baselines from a public fork's reproduction of FastAFD (device time, batch at the memory ceiling)."""
    chip, curves = load_hardware("gb200"), load_curves("h200")
    for name, model, context, *_ in FASTAFD:
        setting = Setting(
            load_model(model),
            curves,
            fixed_context(context),
            Precision("fp8", "fp8", "bf16"),
            SKEW,
            steps_ahead=True,
        )
        for devices, batch, published in WIDE[name]:
            stages = colocated_stages(setting, chip, 1, 1, _one(devices), _one(batch))
            speed = batch / float(stages.tpot[0])
            yield Check(
                "wide EP",
                f"{name} vLLM EP{devices} tok/s/GPU",
                published,
                speed,
                0.15,
                "for information",
                False,
            )


def megascale() -> Iterator[Check]:
    """m from T_c / T_f, what a further micro-batch brings, the balance of n_a, and the hardware per half."""
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
    for model, context in (("mixtral-8x22b", 730), ("mixtral-8x22b", 4096), ("dbrx", 730)):
        yield _choice(model, context)


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


PRICES = {"h800": 5.28, "a800": 2.26, "h20": 1.85, "l20": 1.0, "l40s": 1.08}
"""MegaScale-Infer's own. Step-3's, which the hardware files carry, make an A800 cheaper than an H20."""


def _choice(model: str, context: float) -> Check:
    """1 when the cheapest plan over H800, A800, H20, L20 and L40S puts attention on H20 and experts on L40S."""
    pools = tuple(Pool(load_hardware(name).priced(price), 32) for name, price in PRICES.items())
    setting = Setting(
        load_model(model),
        load_curves("h200"),
        fixed_context(context),
        Precision("bf16", "bf16", "bf16"),
        Routing(0.16),
    )
    best = answer(Question(setting, pools, Targets(0.15), kinds=("afd",))).plans[0]
    chosen = f"{best.attention.hardware} + {best.experts.hardware}"
    wanted = _best_with(setting, pools, "h20", "l40s")
    chosen += f" at {best.usd_per_mtok:.4f} per Mtok in prices of an L20; h20 + l40s {wanted:.4f}"
    return Check(
        "megascale",
        f"hardware for {model} at {context}",
        1.0,
        float(chosen.startswith("h20 + l40s")),
        0.0,
        chosen,
    )


def _best_with(setting: Setting, pools: tuple[Pool, ...], attention: str, experts: str) -> float:
    """USD per million tokens of the best plan on this pair."""
    chosen = tuple(pool for pool in pools if pool.chip.name in (attention, experts))
    found = answer(Question(setting, chosen, Targets(0.15), kinds=("afd",))).plans
    return min(
        p.usd_per_mtok for p in found if (p.attention.hardware, p.experts.hardware) == (attention, experts)
    )


def _one(value: float) -> np.ndarray:
    return np.array([float(value)])
