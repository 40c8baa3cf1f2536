"""Published measurements of whole systems as rows: FastAFD and the vLLM it was compared with, Step-3, DeepSeek.

Every row says what its source says: model, layout, context, requests in flight, tokens per second and device. What a
source leaves open is in the row's comment.
"""

from afserve.cli.plan.catalog import load_hardware, load_model
from bench.planner_served import SKEW, ServedRow

FASTAFD = (
    ("Qwen3-235B 8K", "qwen3-235b-a22b", 8192, 28, 96, 64, 2518.0, 1781.0),
    ("Qwen3-235B 16K", "qwen3-235b-a22b", 16384, 44, 48, 32, 1377.0, 954.0),
    ("MiniMax-M2.5 8K", "minimax-m2", 8192, 68, 72, 48, 2198.0, 1516.0),
    ("MiniMax-M2.5 16K", "minimax-m2", 16384, 68, 36, 24, 1006.0, 745.0),
)
"""(case, model, context, attention devices beside 4 expert devices, requests per attention device, requests per device
of vLLM EP4, tokens per second and device of either). Its public repository."""
WIDE = {
    "Qwen3-235B 8K": ((8, 88, 2271.76), (16, 96, 2331.65), (32, 101, 2304.92)),
    "Qwen3-235B 16K": ((8, 44, 1094.29), (16, 48, 1204.08), (32, 50, 1164.91)),
    "MiniMax-M2.5 8K": ((8, 68, 1991.72), (16, 74, 2218.89), (32, 78, 2162.36)),
    "MiniMax-M2.5 16K": ((8, 34, 1027.35), (16, 37, 1118.73), (32, 39, 1051.05)),
}
"""(devices, requests per device, tokens per second and device) of wider vLLM baselines, from a public fork."""
STEP3 = (
    ("2A2F 4K FP8, average", 4096, 16, "fp8", 3910.0),
    ("2A2F 4K FP8, peak", 4096, 16, "fp8", 4039.0),
    ("3A2F 4K bf16 attention", 4096, 24, "bf16", 3321.0),  # fp8 cache: in bf16 the requests do not fit
    ("4A2F 8K FP8", 8192, 32, "fp8", 2643.0),
)
"""(case, context, attention devices beside 16 expert devices, width of attention and cache, tokens per second and
device), 6,144 requests in three micro-batches: throughput times TPOT of the report."""
DEEPSEEK = (("EP128 4K", 128, 4096, 128, 2324.0),)
"""(case, devices, context, requests per device, tokens per second and device). It was profiled with "an absolutely
balanced MoE routing strategy" (its profile-data repository). Its EP144 in production is judged, not fitted: lengths
there vary, and nobody says how."""


def fastafd_rows() -> list[ServedRow]:
    rows = []
    for case, model, context, ranks, each, _, speed, _ in FASTAFD:
        total, devices = each * ranks, ranks + 4
        rows.append(
            _row(
                case, model, "gb200", "fastafd", "bf16", ranks, context, total, total / devices / speed,
                series=model, expert_devices=4, micro_batches=2,
            )
        )  # fmt: skip
    return rows


def wide_rows() -> list[ServedRow]:
    rows = []
    for case, model, context, _, _, base, _, base_speed in FASTAFD:
        for devices, each, speed in ((4, base, base_speed), *WIDE[case]):
            rows.append(
                _row(
                    f"{case} EP{devices}", model, "gb200", "vllm", "bf16", devices, context, each * devices,
                    each / speed, series=f"wide {case}",
                )
            )  # fmt: skip
    return rows


def step3_rows() -> list[ServedRow]:
    return [
        _row(
            case, "step-3", "h800", "step-3", "fp8", ranks, context, 6144, 6144 / (ranks + 16) / speed,
            series=f"{context} {ranks}", expert_devices=16, micro_batches=3, weights=width,
        )
        for case, context, ranks, width, speed in STEP3
    ]  # fmt: skip


def deepseek_rows() -> list[ServedRow]:
    return [
        _row(
            case, "deepseek-v3", "h800", "deepseek", "bf16", devices, context, each * devices, each / speed,
            series=case, micro_batches=2, skew=0.0,
        )
        for case, devices, context, each, speed in DEEPSEEK
    ]  # fmt: skip


def _row(
    case: str,
    model: str,
    chip: str,
    engine: str,
    kv: str,
    devices: int,
    context: float,
    concurrency: float,
    tpot: float,
    *,
    series: str,
    expert_devices: int = 0,
    micro_batches: int = 1,
    weights: str = "fp8",
    skew: float = SKEW,
) -> ServedRow:
    return ServedRow(
        name=case,
        shape=load_model(model),
        chip=load_hardware(chip),
        engine=engine,
        weights=weights,
        experts="fp8",
        kv=kv,
        devices=devices,
        data_parallel=True,
        expert_parallel=True,
        concurrency=concurrency,
        prompt=context,
        answer=0.0,
        tpot=tpot,
        ttft=0.0,
        series=f"{engine} {series}",
        disaggregated=True,
        expert_devices=expert_devices,
        micro_batches=micro_batches,
        skew=skew,
    )
