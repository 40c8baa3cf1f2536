"""The planner by itself against measured configurations other people published: nothing of it is fitted to their times.

`planner_silicon.py` asks how well a model of served engines carries over to configurations it has not seen; this file
asks what `afserve plan` would have said. Their clients keep a fixed number of requests in flight, which start together
and stay in step, so their TTFT is a crowd's and is not compared.
"""

from collections.abc import Sequence

import numpy as np

from afserve.cli.catalog import load_curves
from afserve.placement.planner.perf import Setting, colocated_stages
from afserve.placement.planner.perf_attention import Precision
from afserve.placement.planner.served import ROUTING, ServedRow
from afserve.placement.planner.workload import Lengths, from_lengths


def errors(rows: Sequence[ServedRow]) -> np.ndarray:
    """Relative errors of TPOT; aggregated rows only."""
    curves = load_curves("h200")
    found = []
    for row in rows:
        work = from_lengths(Lengths(row.prompt), Lengths(row.answer))
        width = Precision(row.weights, row.experts, row.kv)
        setting = Setting(row.shape, curves, work, width, ROUTING)
        split, ranks = (1, row.devices) if row.data_parallel else (row.devices, 1)
        batch = np.array([max(row.running / ranks, 1.0)])
        stages = colocated_stages(setting, row.chip, split, 1, np.array([float(ranks)]), batch)
        found.append(float(stages.tpot[0]) / row.tpot - 1)
    return np.array(found)


def summary(rows: Sequence[ServedRow]) -> dict[str, object]:
    found = errors(rows)
    return {
        "case": "planner by itself, aggregated",
        "rows": len(rows),
        "tpot_error": round(float(np.median(np.abs(found))), 4),
        "tpot_bias": round(float(np.median(found)), 4),
        "inside_25_percent": round(float((np.abs(found) <= 0.25).mean()), 3),
    }
