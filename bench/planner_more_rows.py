"""Rows of `new_rows.csv`, measured configurations from other sources than the public table, as `ServedRow`s.

Two sources are fitted: InferenceX's sweep of positions (answers of 128 tokens to prompts of 1,024 to 30,720; marked
experimental by its authors, medians) and dstack's ratios of prefill and decode workers. Rows that were served with
drafts are not: `planner_drafts.py` asks them.
"""

import csv
import re
from pathlib import Path

from bench.planner_rows import chips, shapes
from bench.planner_served import ServedRow

BACKENDS = {"vllm": "vllm", "sglang": "sglang"}
ELSEWHERE = "elsewhere"
"""How the series of these rows begin."""
SOURCES = "InferenceX token_position_decode_slo and dstackai/benchmarks pd_ratio (Apache-2.0)"


def more_rows(path: Path) -> list[ServedRow]:
    """Rows without drafts of models and chips that the planner knows."""
    known_shapes, known_chips = shapes(), chips()
    with path.open(newline="") as lines:
        return [
            _row(raw, known_shapes, known_chips)
            for raw in csv.DictReader(lines)
            if not raw["note"].startswith("MTP") and raw["model"] in known_shapes
        ]


def _row(raw: dict[str, str], known_shapes: dict, known_chips: dict) -> ServedRow:
    workers = re.fullmatch(r"(\d+)p(\d+)d", raw["disagg"])
    readers, decoders = (int(count) for count in workers.groups()) if workers else (1, 1)
    layout = [
        raw[key] for key in ("model", "chip", "engine", "precision", "dp", "ep", "disagg", "isl", "osl")
    ]
    if workers:
        layout[-1] = re.sub(r".*_(in\d+_out\d+)_.*", r"\1", raw["id"])  # answers differ by chance
    return ServedRow(
        name=raw["id"],
        shape=known_shapes[raw["model"]],
        chip=known_chips[raw["chip"]],
        engine=BACKENDS[raw["engine"]] + (" disaggregated" if workers else ""),
        weights=raw["attention"],
        experts=raw["precision"],
        kv=raw["kv"],
        devices=int(raw["devices"]),
        data_parallel=raw["dp"] == "1",
        expert_parallel=raw["ep"] == "1",
        concurrency=max(float(raw["conc"]) / decoders, 1.0),
        prompt=float(raw["isl"]),
        answer=float(raw["osl"]),
        tpot=float(raw["tpot"]) / 1e3,
        ttft=float(raw["ttft"]) / 1e3,
        series=" ".join([ELSEWHERE, *layout]),
        disaggregated=bool(workers),
        prefill_devices=int(raw["devices"]) if workers else 0,
        prefill_workers=readers,
        decode_workers=decoders,
    )
