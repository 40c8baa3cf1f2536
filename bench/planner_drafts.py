"""Served configurations that were measured with MTP, asked through `afserve plan` with `--draft` and without. Nothing
is fitted to them, and no acceptance is typed.

TensorRT-LLM's are DeepSeek-R1 on B200 and H200. The table does not say that they ran MTP; InferenceX' configurations of
those days do, three tokens, and one where attention is replicated. The sweep with GLM-5 says that it ran MTP. It has
prompts of many thousand tokens and answers of 128, for which plans are too fast in any case; its models that were
served without drafts stand beside it.
"""

import csv
import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.planner_rows import FIRST_DRAFTS, read_rows, unsaid
from bench.planner_typed import say, typed_row

CLAIM = "rows measured with drafts, as typed"
PLAIN = "1.2.0rc6.post2"
SWEEP = "InferenceX experimental/token_position_decode_slo"


@dataclass(frozen=True, slots=True)
class DraftedRow:
    """One measured configuration as flags; tpot in ms. drafted: tokens of MTP in a step."""

    model: str
    line: tuple[str, ...]
    tpot: float
    drafted: int


def read_drafted(path: Path) -> list[DraftedRow]:
    """The sweep's rows of one tensor-parallel instance, with and without drafts."""
    with path.open(newline="") as lines:
        return [
            _row(raw) for raw in csv.DictReader(lines) if raw["source"].startswith(SWEEP) and raw["dp"] != "1"
        ]


def _row(raw: dict[str, str]) -> DraftedRow:
    said = re.match(r"MTP (\d+)", raw["note"])
    line = (
        f"--model {raw['model']} --pool {raw['chip']}={raw['devices']} --engine {raw['engine']} --kind colocated "
        f"--precision {raw['precision']} --attention-precision {raw['attention']} --kv-precision {raw['kv']} "
        f"--devices {raw['devices']} --tensor-parallel {raw['devices']} --concurrency {raw['conc']} "
        f"--input {raw['isl']} --output {raw['osl']}"
    ).split()
    slices = () if raw["ep"] == "1" else ("--expert-slices",)
    return DraftedRow(raw["model"], (*line, *slices), float(raw["tpot"]), int(said.group(1)) if said else 0)


def by_release(path: Path) -> dict[str, list[DraftedRow]]:
    """DeepSeek-R1 with TensorRT-LLM: on B200 in `PLAIN`, and what ran with drafts, by chip and release."""
    found: dict[str, list[DraftedRow]] = {}
    for row in read_rows(path)[0]:
        if unsaid(row) or (row.engine == "trtllm" and row.chip.name == "b200" and row.release == PLAIN):
            one = DraftedRow(row.shape.name, typed_row(row, "tensorrt-llm"), row.tpot * 1e3, 0)
            since = f" since {FIRST_DRAFTS}" if row.release < PLAIN else ""
            found.setdefault(f"deepseek-r1 {row.chip.name}, {row.release}{since}", []).append(one)
    return found


def judged(rows: Sequence[DraftedRow], case: str, *flags: str) -> dict[str, object]:
    """Errors of these rows, each planned with more `flags`."""
    errors, held = [], []
    for row in rows:
        try:
            with redirect_stderr(io.StringIO()):
                best = say((*row.line, *flags))["best"]
        except RuntimeError:
            continue  # the weights do not fit as filed; counted below
        assert isinstance(best, dict)
        low, high = best["tpot_interval_80_ms"]
        errors.append(best["tpot_ms"] / row.tpot - 1)
        held.append(low <= row.tpot <= high)
    return {
        "claim": CLAIM,
        "case": case,
        "rows": len(errors),
        "refused": len(rows) - len(errors),
        "tpot_error": round(float(np.median(np.abs(errors))), 4),
        "bias": round(float(np.median(errors)), 4),
        "inside_80": round(float(np.mean(held)), 3),
    }


def drafted(data: Path) -> list[dict[str, object]]:
    """One row for each model with drafts, planned with and without them, and for each that was served without."""
    rows = read_drafted(data / "new_rows.csv")
    found = []
    for case, some in by_release(data / "silicon_rows.csv").items():
        drafts = () if case.endswith(PLAIN) else (("--draft", "mtp:1"), ("--draft", "mtp:3"))
        for flags in ((), *drafts):
            found.append(judged(some, f"{case}, {flags[-1] if flags else 'without'}", *flags))
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        tokens = mine[0].drafted
        if not tokens:
            found.append(judged(mine, f"{model} of the sweep, served without drafts"))
            continue
        found.append(
            judged(mine, f"{model} of the sweep, served with mtp:{tokens}", "--draft", f"mtp:{tokens}")
        )
        found.append(judged(mine, f"{model} of the sweep, served with mtp:{tokens}, planned without"))
    return found
