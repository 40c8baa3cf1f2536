"""Curves of one machine from its own stage times, as `afserve bench` writes them: JSON lines, one measurement each.

    {"part": "attention", "requests": 8, "context": 256, "seconds": 1.2e-4}   one layer's attention half, no dense FFN
    {"part": "experts", "rows": 64, "active": 20, "seconds": 3.1e-4}          one layer's routed experts on one node
    {"part": "exchange", "requests": 8, "bytes": 131072, "seconds": 2.0e-5}   one direction, both ends' work included
    {"part": "kernel", "requests": 8, "peers": 1, "seconds": 5.0e-6}          one send or receive, the node's own work
    {"part": "answer", "requests": 8, "seconds": 1.2e-5}                      an expert node's own work on one message
    {"part": "whole", "requests": 8, "peers": 1, "bytes": 131072, "half": 1.1e-4, "kernel": 3.0e-6, "seconds": 1.2e-5}
    {"part": "step", "requests": 8, "seconds": 9.0e-4}                        a step outside its layers, head included
    {"part": "control", "requests": 8, "seconds": 3.0e-4, "served": 4.1e-3}   what serving adds to a step of a node
    {"part": "gateway", "requests": 8, "seconds": 4.0e-4}                     the gateway's own work for that step
    {"part": "run", "requests": 8, "context": 84, "attention": 1, "experts": 0, "seconds": 4.1e-3}    a served run
    {"part": "drafts", "requests": 8, "context": 96, "drafts": 3, "seconds": 7.2e-3}     a served step with drafts
    {"part": "beside", "stage": "experts", "alone": 3.1e-4, "seconds": 4.2e-4}     that stage while another core is busy

`rows` counts row-expert pairs, `active` the distinct experts among them. `experts` of a run
counts its expert nodes, 0 where experts are in the same process; `seconds` is its time per token. What stages leave out
of a whole run (wake-ups, work that was put off, others on the machine) is the ratio of runs to their stages. `whole`
is of steps that are one native call: a layer's attention half, a send or receive, one direction. Lines with other parts
are left alone. At least three lines of each of the first two parts are needed; the others fall back to the link's own
figures or to none.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from afserve.errors import ConfigError
from afserve.placement.planner.perf.attention import Precision, attention_step
from afserve.placement.planner.perf.calibration_links import (
    LEAST,
    by_row,
    column,
    in_one_call,
    kernel,
    line,
    link,
    serving,
)
from afserve.placement.planner.perf.calibration_served import drafted, served_bend
from afserve.placement.planner.perf.curve import Curve, CurveSet
from afserve.placement.planner.perf.experts import Routing, active_experts
from afserve.placement.planner.perf.ffn import expert_layer
from afserve.placement.planner.perf.fields import TableFields
from afserve.placement.planner.perf.fit import Fit, fit_positive
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.shape import ModelShape
from afserve.placement.planner.perf.workload import fixed_context

Array = NDArray[np.float64]
_FIELDS = {
    "attention": ("requests", "context"),
    "experts": ("rows", "active"),
    "exchange": ("requests", "bytes"),
    "kernel": ("requests", "peers"),
    "answer": ("requests",),
    "whole": ("requests", "peers", "bytes", "half", "kernel"),
    "step": ("requests",),
    "control": ("requests",),
    "gateway": ("requests",),
    "run": ("requests", "context", "attention", "experts"),
    "drafts": ("requests", "context", "drafts"),
    "attention beside": ("alone",),
    "experts beside": ("alone",),
}
_MORE = ("served", "micro_batches")  # beside `control`: the seconds of the whole step; beside `run`
_LEAST_OF = {
    "requests": 1.0,
    "drafts": 1.0,
    "attention": 1.0,
    "peers": 1.0,
    "micro_batches": 1.0,
} | dict.fromkeys(("alone", "half", "kernel"), 1e-9)
_WHOLE = ("attention", "experts", "micro_batches", "drafts")
_MOST = 8  # nodes of either kind that one machine's calibration serves with; and micro-batches, and drafts
_SHARE = 3.0
"""Of the log share of a peak: two cores of a virtual machine reach a thirtieth of what the chip file's host does, and a
kernel without the instructions that it counts on another thirtieth of that."""
_SLOWER = (1.0, 0.1, 0.01)


def read_calibration(source: str, lines: Sequence[str]) -> dict[str, list[Mapping[str, float]]]:
    """Measurements by part. Raises ConfigError naming file and line."""
    found: dict[str, list[Mapping[str, float]]] = {part: [] for part in _FIELDS}
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        where = f"{source}:{number}"
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON ({error})", param="curves") from error
        part = _part(row)
        if part not in _FIELDS:
            continue
        fields, names = TableFields(where, row), _FIELDS[part]
        found[part].append(
            {name: _number(fields, name) for name in (*names, *filter(fields.has, _MORE))}
            | {"seconds": fields.number("seconds", least=1e-9)}
        )
    for part in ("attention", "experts"):
        if len(found[part]) < LEAST:
            raise ConfigError(
                f"{source}: {len(found[part])} {part} measurements, at least {LEAST} needed. Run afserve bench again",
                param="curves",
            )
    return found


def _number(fields: TableFields, name: str) -> float:
    value = fields.number(name, least=_LEAST_OF.get(name, 0.0))
    if name in _WHOLE and (value != int(value) or value > _MOST):
        raise fields.refuse(name, f"must be a whole number up to {_MOST}")
    return value


def _part(row: object) -> str:
    """What a line measured; of a stage beside another core, which one."""
    if not isinstance(row, Mapping):
        return ""
    return f"{row.get('stage')} beside" if row.get("part") == "beside" else str(row.get("part"))


def models_of(lines: Sequence[str]) -> tuple[str, ...]:
    """The models that rows of a calibration were measured with, as they were called then."""
    rows = (json.loads(line) for line in lines if line.strip())
    named = (row.get("model") for row in rows if isinstance(row, dict))
    return tuple(sorted({name for name in named if isinstance(name, str)}))


def fit_calibration(
    source: str,
    rows: Mapping[str, Sequence[Mapping[str, float]]],
    shape: ModelShape,
    chip: Hardware,
    precision: Precision,
) -> CurveSet:
    """Curves that reproduce these stage times with this shape on this chip's stated peaks."""
    attention, core, layer = _attention(rows["attention"], shape, chip, precision)
    sends, answer = kernel(rows["kernel"], shape.experts.top_k), by_row(rows["answer"])
    curves = {
        "gemm": attention,
        "core": core,
        "prefill": Curve(0.0, 1.0, attention.compute, attention.spread, source=source),
        "attention_layer": layer,
        "experts": _experts(rows["experts"], shape, chip, precision),
        "step": _step(rows["step"], rows["control"], shape, chip, attention),
        "gateway": line(rows["gateway"]),
        "exchange": sends,
        "allreduce": Curve(0.0, 1.0, 1.0),
        **dict.fromkeys(("fast_link", "network"), link(rows["exchange"], sends, answer, chip)),
    }
    if answer.rows:
        curves["answer"] = answer
    whole = in_one_call(rows["whole"], layer, _halves(rows["attention"]), shape.experts.top_k, chip)
    apart = curves | {"attention_layer": whole.get("attention_layer", layer)}
    curves["together"] = _together(rows, CurveSet(source, apart, 0.0), shape, chip, precision)
    for stage in ("attention", "experts"):
        longer = [row["seconds"] / row["alone"] for row in rows[f"{stage} beside"]]
        if longer:
            curves[f"{stage}_beside"] = Curve(
                0.0, 1.0, 1.0, bend=((1.0, max(1.0, float(np.median(longer)))),)
            )
    stages = CurveSet(source, dict(curves), 0.0)
    stages.whole = CurveSet(source, curves | whole, 0.0) if whole else None
    known = Setting(shape, stages, fixed_context(1.0), precision, Routing())
    for name, experts in (("served", 0.0), ("served_apart", 1.0)):
        runs = [row for row in rows["run"] if row["experts"] == experts and row["attention"] == 1]
        if experts and whole:
            runs = [row for row in runs if min(row.get("micro_batches", 1.0), row["requests"]) > 1]
        if runs:
            curves[name] = Curve(0.0, 1.0, 1.0, rows=len(runs), bend=served_bend(runs, known, chip))
    if len(rows["drafts"]) >= LEAST:
        curves["drafted"] = drafted(rows["drafts"], known, chip)
    spread = float(np.hypot(attention.spread, curves["experts"].spread) / 2)
    most = (
        float(column(rows["attention"], "requests").max()),
        float(column(rows["attention"], "context").max()),
    )
    fitted = CurveSet(source, curves, max(spread, 0.02), most=most)
    fitted.runs = tuple(row for row in rows["run"] if row["experts"])
    if whole:
        fitted.whole = CurveSet(source, curves | whole, fitted.model_spread, most=most)
    return fitted


def _halves(rows: Sequence[Mapping[str, float]]) -> dict[float, float]:
    """Seconds of a layer's attention half by requests, at the shortest context of each."""
    longest_first = sorted(rows, key=lambda row: -row["context"])
    return {row["requests"]: row["seconds"] for row in longest_first}


def _attention(
    rows: Sequence[Mapping[str, float]], shape: ModelShape, chip: Hardware, precision: Precision
) -> tuple[Curve, Curve, Curve]:
    """(products, core, launch per layer)."""
    requests, context = column(rows, "requests"), column(rows, "context")

    def build(v: Array) -> tuple[Curve, Curve, Curve]:
        return Curve(0.0, v[1], v[2], row_bytes=v[5]), Curve(0.0, v[3], v[4]), Curve(v[0], 1.0, 1.0)

    def predict(v: Array) -> Array:
        products, core, layer = build(v)
        curves = CurveSet(
            "", {"gemm": products, "core": core, "attention_layer": layer, "step": Curve(0.0, 1.0, 1.0)}, 0.0
        )
        times = attention_step(shape, chip, curves, precision, requests, context, 1, with_ffn=False)
        return times.moe_layers / shape.experts.layers

    start = np.array([2e-5, 0.6, 0.3, 0.6, 0.2, 1.0])
    prior = np.array([2.0, _SHARE, _SHARE, _SHARE, _SHARE, 1.0])
    seconds = column(rows, "seconds")
    fit = _fitted(predict, seconds, _scaled(start, (1, 2, 3, 4), predict, seconds), prior)
    products, core, layer = (_with_spread(curve, fit) for curve in build(fit.values))
    ratio = seconds / predict(fit.values)
    bend = tuple((size, float(np.median(ratio[requests == size]))) for size in np.unique(requests).tolist())
    return products, core, replace(layer, bend=bend)


def _experts(
    rows: Sequence[Mapping[str, float]], shape: ModelShape, chip: Hardware, precision: Precision
) -> Curve:
    pairs, active = column(rows, "rows"), column(rows, "active")

    def build(v: Array) -> Curve:
        return Curve(v[0], v[1], v[2], pad_rows=0.0, per_group=v[3], row_bytes=v[4])

    def predict(v: Array) -> Array:
        return expert_layer(
            shape, chip, CurveSet("", {"experts": build(v)}, 0.0), precision.experts, pairs, active
        )

    start, prior = np.array([2e-5, 0.6, 0.3, 1e-6, 1.0]), np.array([2.0, _SHARE, _SHARE, 2.0, 1.0])
    seconds = column(rows, "seconds")
    fit = _fitted(predict, seconds, _scaled(start, (1, 2), predict, seconds), prior)
    return _with_spread(build(fit.values), fit)


def _scaled(start: Array, shares: Sequence[int], predict: Callable[[Array], Array], seconds: Array) -> Array:
    """The start with shares of the peaks moved to where the median row is met: a laptop is not the chip file's host."""
    moved = start.copy()
    moved[list(shares)] *= np.clip(np.median(predict(start) / seconds), 1e-4, 1.0)
    return moved


def _fitted(predict: Callable[[Array], Array], seconds: Array, start: Array, prior: Array) -> Fit:
    """The best of fits that begin with products as fast as memory, and much slower. The third value is their share of
    the peak: where memory hides them, a little slower changes nothing, so that no fit would find out."""
    found = []
    for slower in _SLOWER:
        begin = start.copy()
        begin[2] *= slower
        fit = fit_positive(predict, seconds, begin, prior_spread=prior)
        found.append((float(np.abs(np.log(predict(fit.values) / seconds)).mean()), fit))
    return min(found, key=lambda one: one[0])[1]


def _step(
    rows: Sequence[Mapping[str, float]],
    control: Sequence[Mapping[str, float]],
    shape: ModelShape,
    chip: Hardware,
    products: Curve,
) -> Curve:
    """Seconds per step and per request beside the LM head, which the products' curve already prices."""
    served = serving(control)
    if len(rows) < LEAST:
        return served
    requests, seconds = column(rows, "requests"), column(rows, "seconds")
    elems = shape.vocab * shape.hidden
    head = products.seconds(
        2.0 * elems + 0 * requests, 2 * requests * elems, chip.bandwidth, chip.flops("bf16")
    )
    fit = fit_positive(lambda v: np.asarray(head + v[0] + v[1] * requests), seconds, np.array([1e-4, 1e-6]))
    launch, each = float(fit.values[0]) + served.launch, float(fit.values[1]) + served.per_group
    return Curve(launch, 1.0, 1.0, fit.spread, per_group=each, rows=len(rows))


def _together(
    rows: Mapping[str, Sequence[Mapping[str, float]]],
    apart: CurveSet,
    shape: ModelShape,
    chip: Hardware,
    precision: Precision,
) -> Curve:
    """What a layer takes longer where one process computes both halves than they do apart: each finds the other's
    weights in the caches. From the engine's own whole steps, those that served ones are compared with."""
    steps = [row for row in rows["control"] if row.get("served", 0.0) > row["seconds"]]
    if len(steps) < LEAST:
        return Curve(0.0, 1.0, 1.0)
    requests, layers = column(steps, "requests"), shape.experts.layers
    whole = column(steps, "served") - column(steps, "seconds")
    context = float(column(rows["attention"], "context").min())
    alone = CurveSet(
        apart.name, apart.curves | {"step": _step(rows["step"], (), shape, chip, apart.curves["gemm"])}, 0.0
    )
    half = attention_step(shape, chip, alone, precision, requests, context, 1)
    active = active_experts(Routing(), shape.experts.experts, shape.experts.top_k, requests)
    experts = expert_layer(
        shape, chip, alone, precision.experts, requests * shape.experts.top_k, np.asarray(active)
    )
    parts = half.moe_layers + half.outside + layers * experts
    fit = fit_positive(
        lambda v: np.asarray(parts + layers * (v[0] + v[1] * requests)),
        whole,
        np.array([1e-5, 1e-7]),
        prior_spread=np.array([3.0, 3.0]),
    )
    return Curve(float(fit.values[0]), 1.0, 1.0, fit.spread, per_group=float(fit.values[1]), rows=len(steps))


def _with_spread(curve: Curve, fit: Fit) -> Curve:
    values = (float(curve.launch), float(curve.memory), float(curve.compute))
    return Curve(
        *values, fit.spread, 0.0, float(curve.per_group), float(curve.row_bytes), fit.rows, "calibration"
    )
