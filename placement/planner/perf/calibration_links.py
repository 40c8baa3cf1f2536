"""Curves of what rows cost on their way between nodes of one machine, from its own measurements.

The parts are those of `calibration.py`: the gateway's work, what serving adds to a step, sends and receives, an expert
node's work on a message, the link beyond both; and all of these but the first two anew for decode steps that are one
native call. It reads no files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.curve import Curve
from afserve.placement.planner.perf.ffn import distinct_targets
from afserve.placement.planner.perf.fit import fit_positive
from afserve.placement.planner.perf.hardware import Hardware

Array = NDArray[np.float64]
LEAST = 3
"""Rows that a line is fitted to, at least."""
_DRIFT = 0.3  # how much slower or faster a shared machine was in the served run, all sizes alike


def column(rows: Sequence[Mapping[str, float]], name: str) -> Array:
    return np.array([row[name] for row in rows])


def line(rows: Sequence[Mapping[str, float]]) -> Curve:
    """Seconds per step and per request; nothing where it was not measured."""
    if len(rows) < LEAST:
        return Curve(0.0, 1.0, 1.0)
    requests, seconds = column(rows, "requests"), column(rows, "seconds")
    fit = fit_positive(lambda v: np.asarray(v[0] + v[1] * requests), seconds, np.array([1e-4, 1e-5]))
    return Curve(float(fit.values[0]), 1.0, 1.0, fit.spread, per_group=float(fit.values[1]), rows=len(rows))


def serving(rows: Sequence[Mapping[str, float]]) -> Curve:
    """As `line`, but what is met are whole served steps: this is the small difference of two large times, which may
    be twice as much or nothing when either was measured 5 % off. A served run that the machine was slower in, all
    sizes alike, tells nothing of the control plane: a speed of the engine's part is fitted too, and left out."""
    if len(rows) < LEAST:
        return Curve(0.0, 1.0, 1.0)
    requests, seconds = column(rows, "requests"), column(rows, "seconds")
    whole = np.array([row.get("served", row["seconds"]) for row in rows])
    engine = np.maximum(whole - seconds, 0.0)
    fit = fit_positive(
        lambda v: np.asarray(v[2] * engine + v[0] + v[1] * requests),
        whole,
        np.array([3e-4, 2e-5, 1.0]),
        prior_spread=np.array([3.0, 3.0, _DRIFT]),
    )
    return Curve(float(fit.values[0]), 1.0, 1.0, fit.spread, per_group=float(fit.values[1]), rows=len(rows))


def kernel(rows: Sequence[Mapping[str, float]], top_k: float) -> Curve:
    """Per send or receive, per further peer, and per row and peer that gets it."""
    if len(rows) < LEAST:
        return Curve(0.0, 1.0, 1.0)
    requests, peers, seconds = (column(rows, name) for name in ("requests", "peers", "seconds"))
    sent = requests * distinct_targets(top_k, peers)
    fit = fit_positive(
        lambda v: np.asarray(v[0] + v[1] * (peers - 1) + v[2] * sent), seconds, np.array([1e-5, 1e-5, 1e-7])
    )
    launch, further, each = (float(value) for value in fit.values)
    further = further if (peers > 1).any() else 0.0
    return Curve(launch, 1.0, 1.0, fit.spread, per_group=further, per_row=each, rows=len(rows))


def by_row(rows: Sequence[Mapping[str, float]]) -> Curve:
    found = line(rows)
    return replace(found, per_group=0.0, per_row=found.per_group)


def link(rows: Sequence[Mapping[str, float]], kernel: Curve, answer: Curve, chip: Hardware) -> Curve:
    """Launch and share of bandwidth of the link alone, beyond the latency that the chip's file gives.

    A measured one-way time contains the work of both ends, which is subtracted first: a send or receive at the
    attention side (`kernel`) and half of an expert node's work on a message (`answer`; a second `kernel` where no
    answer was measured). Example: 20 us one way, a kernel of 5 us and an answer of 8 us leave 20 - 5 - 4 = 11 us for
    the link.
    """
    if len(rows) < LEAST:
        return Curve(0.0, 1.0, 1.0)
    requests, size, whole = (column(rows, name) for name in ("requests", "bytes", "seconds"))
    own = kernel.launch + kernel.per_row * requests
    there = (answer.launch + answer.per_row * requests) / 2 if answer.rows else own
    fit = fit_positive(
        lambda v: np.asarray(v[0] + size / (chip.network * v[1])),
        np.maximum(whole - own - there, 0.02 * whole),
        np.array([1e-5, 0.5]),
    )
    launch = float(fit.values[0]) - chip.network_latency
    return Curve(launch, float(fit.values[1]), 1.0, fit.spread, rows=len(rows))


def in_one_call(
    rows: Sequence[Mapping[str, float]],
    layer: Curve,
    halves: Mapping[float, float],
    top_k: float,
    chip: Hardware,
) -> dict[str, Curve]:
    """The curves that are others in such steps, by name; none where they were not measured. `layer`: the attention
    half's where layers are sent one by one, `halves`: its seconds there by requests. All that an expert node does for a
    message beside its experts is in the link."""
    alone = sorted((row for row in rows if row["peers"] == 1), key=lambda row: row["requests"])
    if len(alone) < LEAST:
        return {}
    sizes, requests = sorted(halves), column(alone, "requests")
    one_by_one = np.interp(np.log(requests), np.log(sizes), [halves[size] for size in sizes])
    share = np.interp(np.log(sizes), np.log(requests), column(alone, "half") / one_by_one)
    bend = tuple(zip(sizes, (share * layer.bent(np.array(sizes))).tolist(), strict=True))
    sends = kernel([{**row, "seconds": row["kernel"]} for row in rows], top_k)
    answer = Curve(0.0, 1.0, 1.0, rows=len(alone))
    way = link(alone, sends, answer, chip)
    return {
        "attention_layer": replace(layer, bend=bend),
        "exchange": sends,
        "answer": answer,
        **dict.fromkeys(("fast_link", "network"), way),
    }
