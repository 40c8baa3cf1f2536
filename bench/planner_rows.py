"""Read the public table of measured configurations (`silicon_rows.csv`) into `ServedRow`s, and split it.

Traps of that file, each handled here: the same measurement appears up to three times under different ids; parallel
degrees are doubled in part of it (TP8 with EP8 is written 64 / 8 / 8); concurrency is in the source field; most
disaggregated rows do not say how many workers served them (they are left out and counted); others are filed as
aggregated, with the devices of all workers as one tensor-parallel group (`impossible`).

Settings that the file does not give are taken from the sweep that measured (SemiAnalysisAI/InferenceX, its scripts and
configurations of the day), or inferred from inputs, never from times. SGLang's cache on Blackwell is FP8, by the
scripts' flag, and vLLM's: in 16 bits some of the concurrencies would not fit that were served without a wait. Until
January 2026 clients did not warm a server up: the first tokens of SGLang's rows of that time, which compiles kernels as
it meets them, are taken for unknown (four requests at a time and 128 took 5 to 9 s alike). TensorRT-LLM's workers have
a largest batch, a power of two. The names of the recipes that InferenceX' sweep started say it (`planner_starts.csv`);
where none is known, it is the largest within the highest concurrency that their configuration was run with.
"""

import csv
import hashlib
import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path

from afserve.placement.planner.perf.hardware import Hardware, hardware_from_table
from afserve.placement.planner.perf.shape import ModelShape
from afserve.placement.planner.perf.shape_reader import shape_from_config
from bench.planner_served import ServedRow

ROOT = Path(__file__).resolve().parents[1]
MODELS = {
    "DeepSeek-R1": "deepseek-v3",
    "DeepSeek-V3": "deepseek-v3",
    "DeepSeek-R1-NVFP4": "deepseek-v3",
    "DeepSeek-V3.1-NVFP4": "deepseek-v3",
    "GLM-5": "glm-5",
    "Kimi-K2.5": "kimi-k2",
    "MiniMax-M2.5": "minimax-m2",
    "Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "gpt-oss-120b": "gpt-oss-120b",
}
WIDTH = {
    "fp8": "fp8",
    "fp8_block": "fp8",
    "nvfp4": "fp4",
    "int4_wo": "int4",
    "fp4": "fp4",
    "bf16": "bf16",
    "int4": "int4",
}
STARTS = Path(__file__).with_name("planner_starts.csv")
WARMED_UP = "2026-01-21"
"""From this day on InferenceX' clients send requests that are not counted, before those that are (its pull request
480)."""
DRAWN = 0.9
"""InferenceX draws lengths evenly between 0.8 and 1 of those filed (its RANDOM_RANGE_RATIO): so many on average."""
FIRST_DRAFTS = "2026-01-14"
"""From this day on InferenceX measured TensorRT-LLM 1.1.0rc2.post2 with drafts (its pull request 392)."""
Raw = dict[str, str]


def shapes() -> dict[str, ModelShape]:
    found = {}
    for name in set(MODELS.values()):
        table = tomllib.loads((ROOT / f"configs/models/{name}.toml").read_text())
        found[name] = shape_from_config(name, table["config"])
    return found


def chips() -> dict[str, Hardware]:
    found = {}
    for path in sorted((ROOT / "configs/hardware").glob("*.toml")):
        chip = hardware_from_table(path.name, tomllib.loads(path.read_text()))
        found[chip.name] = chip
    return found


def read_rows(path: Path) -> tuple[list[ServedRow], dict[str, int]]:
    """(rows of MoE models, how many were left out and why). Repeated measurements are kept once."""
    known_shapes, known_chips = shapes(), chips()
    rows: list[tuple[ServedRow, str]] = []
    left = {"dense models": 0, "repeats": 0, "disaggregated without worker counts": 0}
    seen: set[tuple[str, str]] = set()
    with path.open(newline="") as lines:
        for raw in csv.DictReader(lines):
            if raw["model_path"].split("/")[-1] not in MODELS:
                left["dense models"] += 1
                continue
            key = (f"{float(raw['silicon_ttft_ms']):.4g}", f"{float(raw['silicon_tpot_ms']):.4g}")
            if key in seen:
                left["repeats"] += 1
                continue
            seen.add(key)
            row = _row(raw, known_shapes, known_chips)
            if row is None:
                left["disaggregated without worker counts"] += 1
            else:
                rows.append((row, _configuration(raw)))
    return _limited(rows, starts()), left


def starts() -> dict[str, float]:
    """Requests that a decode worker was started to decode at once, by row."""
    with STARTS.open(newline="") as lines:
        said = csv.DictReader(line for line in lines if not line.startswith("#"))
        return {raw["id"]: float(raw["running"]) for raw in said}


def _configuration(raw: Raw) -> str:
    """What was started once and asked with several concurrencies; "" where the file does not tell."""
    return _said(raw, r"config_id=(\d+)")


def _said(raw: Raw, pattern: str) -> str:
    """What the row's source says there; "" where it says nothing."""
    found = re.search(pattern, raw["silicon_data_source"])
    return found.group(1) if found else ""


def _limited(rows: list[tuple[ServedRow, str]], started: dict[str, float]) -> list[ServedRow]:
    most: dict[str, float] = {}
    for row, configuration in rows:
        if row.engine == "trtllm disaggregated" and configuration:
            most[configuration] = max(most.get(configuration, 1.0), row.concurrency)
    guessed = {name: 2.0 ** math.floor(math.log2(highest)) for name, highest in most.items()}
    return [
        replace(row, limit=started.get(row.name, guessed.get(configuration, math.inf)))
        for row, configuration in rows
    ]


def impossible(row: ServedRow) -> bool:
    """Filed as one aggregated instance, but tensor-parallel over more devices than any engine offers."""
    return (
        not row.disaggregated
        and not row.data_parallel
        and row.devices > 8
        and row.shape.attention[0].kind == "mla"
    )


def unsaid(row: ServedRow) -> bool:
    """Served with drafts, which the file does not say. Configurations of DeepSeek-R1 stand in it twice, the second
    time 1.2 to 2.3 times as fast: on B200 as TensorRT-LLM 1.2.0rc6.post3, which InferenceX ran with MTP alone (its pull
    requests 632 and 642), and on B200 and H200 in 1.1.0rc2.post2 from `FIRST_DRAFTS` on. Such rows are fitted to
    nothing; `planner_drafts.py` asks them."""
    if row.engine != "trtllm" or row.shape.name != "deepseek-v3":
        return False
    later = row.release == "1.1.0rc2.post2" and row.day >= FIRST_DRAFTS
    return later or (row.release == "1.2.0rc6.post3" and row.chip.name == "b200")


def _row(raw: Raw, known_shapes: dict[str, ModelShape], known_chips: dict[str, Hardware]) -> ServedRow | None:
    apart = raw["mode"] == "disagg"
    if apart and not raw["decode_num_workers"]:
        return None
    side = "decode_" if apart else ""
    model = MODELS[raw["model_path"].split("/")[-1]]
    chip = known_chips[raw["system"].removesuffix("_sxm")]
    devices, replicated, spread = _parallel(raw, side)
    concurrency = _concurrency(raw) / (_whole(raw, "decode_num_workers") if apart else 1)
    precision = raw["precision"] or "fp8"
    drawn = DRAWN if raw["silicon_data_source"].startswith("db-dump") else 1.0
    series = [
        model,
        chip.name,
        raw["backend"],
        precision,
        raw["mode"],
        devices,
        replicated,
        spread,
        raw["isl"],
        raw["osl"],
    ]
    return ServedRow(
        name=raw["id"],
        shape=known_shapes[model],
        chip=chip,
        engine=raw["backend"] + (" disaggregated" if apart else ""),
        weights=_weights(raw, model),
        experts=WIDTH[raw["moe_quant_mode"] or precision],
        kv=_cache(raw, model, chip),
        devices=devices,
        data_parallel=replicated,
        expert_parallel=spread,
        concurrency=max(concurrency, 1.0),
        prompt=drawn * float(raw["isl"]),
        answer=drawn * float(raw["osl"]),
        tpot=float(raw["silicon_tpot_ms"]) / 1e3,
        ttft=0.0 if _cold(raw) else float(raw["silicon_ttft_ms"]) / 1e3,
        series=" ".join(str(part) for part in series),
        release=raw["backend_version"],
        day=_day(raw),
        disaggregated=apart,
        prefill_devices=_parallel(raw, "prefill_")[0] if apart else 0,
        prefill_workers=_whole(raw, "prefill_num_workers") if apart else 1,
        decode_workers=_whole(raw, "decode_num_workers") if apart else 1,
    )


def _parallel(raw: Raw, side: str) -> tuple[int, bool, bool]:
    """(devices of an instance, attention replicated, experts spread)."""
    tensor, data = _whole(raw, side + "tp_size"), _whole(raw, side + "attention_dp_size")
    split, spread = _whole(raw, side + "moe_tp_size"), _whole(raw, side + "moe_ep_size")
    if split == spread > 1:
        devices = split
    elif tensor == data > 1 and spread == tensor * data:
        devices = tensor
    else:
        devices = split * spread
    return max(devices, 1), data > 1 and tensor == 1, spread > 1


def _weights(raw: Raw, model: str) -> str:
    """Four-bit DeepSeek, GLM and Kimi checkpoints and gpt-oss keep attention in 16 bits."""
    width = WIDTH[raw["gemm_quant_mode"] or raw["precision"] or "fp8"]
    wide = model in ("deepseek-v3", "kimi-k2", "glm-5") and width in ("fp4", "int4")
    return "bf16" if wide or model == "gpt-oss-120b" else width


def _cache(raw: Raw, model: str, chip: Hardware) -> str:
    """Of keys and values: what the scripts' --kv-cache-dtype says of SGLang's rows."""
    narrow = chip.flops_fp4 > 0 or model == "qwen3.5-397b-a17b"
    by_flag = raw["backend"] == "sglang" and narrow and raw["precision"] != "bf16"
    inferred = raw["backend"] == "vllm" and chip.flops_fp4 > 0
    return "fp8" if by_flag or inferred or raw["backend"] == "trtllm" else "bf16"


def _cold(raw: Raw) -> bool:
    """Whether its first tokens waited for kernels to be compiled."""
    return raw["backend"] == "sglang" and raw["mode"] != "disagg" and "" < _day(raw) < WARMED_UP


def _day(raw: Raw) -> str:
    return _said(raw, r"measured=([\d-]+)")


def _concurrency(raw: Raw) -> float:
    found = re.search(r"concurrency=(\d+)", raw["silicon_data_source"]) or re.search(r"_c(\d+)_", raw["id"])
    return float(found.group(1)) if found else float(raw["batch_size"] or raw["decode_batch_size"] or 1)


def _whole(raw: Raw, key: str) -> int:
    return int(raw[key]) if raw[key] not in ("", "0") else 1


def fold(row: ServedRow, folds: int = 5) -> int:
    """Whole series (every concurrency of one configuration) share a fold, by a hash of what they are."""
    return int(hashlib.sha256(row.series.encode()).hexdigest(), 16) % folds
