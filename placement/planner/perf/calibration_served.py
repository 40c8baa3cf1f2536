"""What served runs of one machine took beside what their stages say: rows of its calibration in, curves out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from afserve.placement.planner.perf.calibration_links import column
from afserve.placement.planner.perf.curve import Curve
from afserve.placement.planner.perf.drafting import DRAFTERS, Drafts
from afserve.placement.planner.perf.fit import fit_positive
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import afd_stages, colocated_stages
from afserve.placement.planner.perf.workload import fixed_context

_NOISE, _TILT = 0.1, 0.05  # of a run's log seconds; how far its ratio changes with each doubling of requests
_REFERENCE = 8.0  # requests: the middle of what is measured


def drafted(rows: Sequence[Mapping[str, float]], setting: Setting, chip: Hardware) -> Curve:
    """What a colocated step that verifies drafts takes: `scale` times its stages, and `launch`, `per_row` for each
    draft of a sequence, whose pass comes behind the one before, and `per_group` for each request. It has nothing of
    what served runs without drafts say: of those, one native call makes several tokens. Whole steps are met."""
    one, stages = np.ones(1), list[float]()
    for row in rows:
        drafts = Drafts(DRAFTERS["mtp"], int(row["drafts"]))
        asked = replace(setting, workload=fixed_context(row["context"]), drafts=drafts)
        found = colocated_stages(asked, chip, 1, 1, one, np.array([row["requests"]]))
        stages.append(float(found.iteration[0]))
    requests, count, whole = column(rows, "requests"), column(rows, "drafts"), np.array(stages)
    fit = fit_positive(
        lambda v: np.asarray(v[0] + v[1] * count + v[2] * requests + v[3] * whole),
        column(rows, "seconds"),
        np.array([5e-4, 3e-4, 5e-5, 1.0]),
        prior_spread=np.array([3.0, 3.0, 3.0, 1.0]),
    )
    launch, each, request, scale = (float(value) for value in fit.values)
    return Curve(launch, 1.0, 1.0, fit.spread, per_group=request, per_row=each, rows=len(rows), scale=scale)


def served_bend(
    runs: Sequence[Mapping[str, float]], setting: Setting, chip: Hardware
) -> tuple[tuple[float, float], ...]:
    """What served runs took over what their stages say, at 1 request and at the most that ran."""
    ratios = []
    for run in runs:
        context = replace(setting, workload=fixed_context(run["context"]))
        one, requests, m = np.ones(1), run["requests"], int(min(run.get("micro_batches", 1), run["requests"]))
        batch = np.array([requests / m])
        if run["experts"]:
            found = afd_stages(context, chip, chip, 1, m, one, one, batch)
        else:
            found = colocated_stages(context, chip, 1, m, one, batch)
        ratios.append((requests, run["seconds"] / float(found.tpot[0])))
    return bend_through(ratios)


def bend_through(ratios: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """A ratio for all sizes from (requests, ratio) of some: a line of its logarithm over that of requests, as flat as
    noise of 10 % allows. One row says a factor and hardly a slope."""
    size = np.log2(np.array([requests for requests, _ in ratios]) / _REFERENCE)
    ratio = np.log(np.array([ratio for _, ratio in ratios]))
    columns = np.stack([np.ones_like(size), size], axis=1)
    pull = np.diag([0.0, (_NOISE / _TILT) ** 2])
    level, slope = np.linalg.solve(columns.T @ columns + pull, columns.T @ ratio)
    ends = (1.0, max(2.0, *(requests for requests, _ in ratios)))
    return tuple((end, float(np.exp(level + slope * np.log2(end / _REFERENCE)))) for end in ends)
