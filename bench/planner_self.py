"""The planner against afserve itself on this machine: a calibration and measured runs in, errors out.

calibration: the JSON lines of placement/calibration.py, written by `afserve bench`
measured: JSON lines {"attention": 1, "experts": 2, "micro_batches": 2, "batch": 8, "context": 96, "tpot_ms": ...,
    "tok_s": ...}; experts 0 is colocated; batch counts the requests of all attention nodes
"""

import json
from pathlib import Path

import numpy as np

from afserve.cli.catalog import load_curves, load_hardware, load_model, read_lines
from afserve.placement.perf import Setting, afd_stages, colocated_stages
from afserve.placement.perf_attention import Precision
from afserve.placement.perf_experts import Routing
from afserve.placement.workload import fixed_context


def compare(
    calibration: Path, measured: Path, model: str, precision: str = "bf16"
) -> list[dict[str, object]]:
    """One row per measured run: predicted TPOT and throughput and their relative errors."""
    chip, shape = load_hardware("cpu-host"), load_model(model)
    widths = Precision(precision, precision, precision)
    curves = load_curves(str(calibration), shape, chip, widths)
    rows = []
    for line in read_lines(measured, "measured"):
        run = json.loads(line)
        context = fixed_context(run["context"])
        setting = Setting(shape, curves, context, widths, Routing(0.0), exchange_kernels=False)
        tpot = predict(setting, run)
        speed = run["batch"] / tpot
        rows.append(
            {
                "claim": "afserve on this CPU",
                "case": f"{run['attention']}x{run['experts']}, m {run['micro_batches']}, batch {run['batch']}",
                "tpot_error": round(tpot * 1e3 / run["tpot_ms"] - 1, 4),
                "tok_s_error": round(speed / run["tok_s"] - 1, 4),
            }
        )
    return rows


def predict(setting: Setting, run: dict[str, float]) -> float:
    """Seconds per token of one run."""
    chip, ranks = load_hardware("cpu-host"), np.array([float(run["attention"])])
    each = np.array([run["batch"] / run["attention"] / run["micro_batches"]])
    if not run["experts"]:
        stages = colocated_stages(setting, chip, 1, int(run["micro_batches"]), np.ones(1), each)
    else:
        devices = np.array([float(run["experts"])])
        stages = afd_stages(setting, chip, chip, 1, int(run["micro_batches"]), ranks, devices, each)
    return float(stages.tpot[0])
