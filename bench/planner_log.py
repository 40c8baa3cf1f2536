"""The per-request log of a real vLLM run (Qwen3-30B-A3B, two RTX PRO 6000, data parallel with expert parallelism),
played request by request with step times of the planner. Nothing of it was used for fitting."""

import json
from pathlib import Path

import numpy as np

from afserve.cli.plan.catalog import load_curves, load_hardware, load_model
from afserve.placement.planner.perf.attention import Precision, prefill_step
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.halves import expert_half
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import colocated_stages
from afserve.placement.planner.perf.workload import fixed_context
from afserve.placement.planner.simulate.requests import Arrivals, Rank, ServedRequests, serve

SLOTS, CHUNK, RANKS = 128, 2048.0, 2


def compare(folder: Path) -> dict[str, float]:
    """Measured and predicted medians and means, and relative errors. Times in ms."""
    lines = [
        json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines() if line.strip()
    ]
    lines.sort(key=lambda row: row["arrival_time"])
    ttft = np.array([row["first_token_ts"] - row["queued_ts"] for row in lines])
    tpot = np.array(
        [(row["last_token_ts"] - row["first_token_ts"]) / max(row["output_toks"] - 1, 1) for row in lines]
    )
    played = play(lines)
    return {
        **_pair("tpot_median", tpot, played.tpot, np.median),
        **_pair("tpot_mean", tpot, played.tpot, np.mean),
        **_pair("ttft_median", ttft, played.ttft, np.median),
        **_pair("ttft_mean", ttft, played.ttft, np.mean),
    }


def _pair(name: str, measured: np.ndarray, predicted: list[float], by: object) -> dict[str, float]:
    assert callable(by)
    real, guess = float(by(measured)) * 1e3, float(by(np.array(predicted))) * 1e3
    return {f"{name}_measured_ms": real, f"{name}_predicted_ms": guess, f"{name}_error": guess / real - 1}


def play(lines: list[dict[str, float]]) -> ServedRequests:
    """Both ranks step together, so they are one queue of 256 slots whose steps hold half the requests each."""
    prompt = np.array([float(row["input_toks"]) for row in lines])
    answer = np.array([float(row["output_toks"]) for row in lines])
    start = np.array([row["arrival_time"] for row in lines])
    context = float((answer * (prompt + answer / 2)).sum() / answer.sum())
    setting = Setting(
        shape=load_model("qwen3-30b-a3b"),
        curves=load_curves("h200"),
        workload=fixed_context(context),
        precision=Precision("bf16", "bf16", "bf16"),
        routing=Routing(0.4),
    )
    chip = load_hardware("rtx-pro-6000")
    held = np.arange(1, RANKS * SLOTS + 1, dtype=np.float64)
    stages = colocated_stages(setting, chip, 1, 1, np.full_like(held, RANKS), held / RANKS)
    tokens = np.array([CHUNK])
    read = prefill_step(setting.shape, chip, setting.curves, setting.precision, tokens, 0.0, 1)
    moe = expert_half(setting, chip, tokens * RANKS, np.array([float(RANKS)])) * setting.shape.experts.layers
    rank = Rank(
        slots=RANKS * SLOTS,
        step=np.concatenate([stages.tpot[:1], stages.tpot]),
        factors=np.ones(1),
        prompt_second=float((read + moe)[0]) / (CHUNK * RANKS),
        chunk=CHUNK * RANKS,
        ahead=True,
    )
    done = ServedRequests()
    for _ in serve(rank, Arrivals(start - start[0], prompt, answer), np.random.default_rng(0), done):
        pass
    return done
