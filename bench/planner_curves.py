"""Fits curves to measured kernel times: one function for each CSV layout, rows in (dicts of text), a `Curve` out.

The layouts are those of the public AIConfigurator kernel files; each function names the columns. Latencies are in ms.
It opens no file: the caller reads and filters rows and knows on which device they were measured.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.curve import Curve, smooth_max
from afserve.placement.planner.perf.experts import Routing, active_experts
from afserve.placement.planner.perf.fit import Fit, fit_positive
from afserve.placement.planner.perf.hardware import PRECISIONS, Hardware

Array = NDArray[np.float64]
Row = Mapping[str, str]
_MLA_ROW, _MLA_RANK, _MLA_HIDDEN = 576, 512, 7168


def column(rows: Sequence[Row], name: str) -> Array:
    return np.array([float(row[name]) for row in rows])


def fit_decode_attention(rows: Sequence[Row], chip: Hardware, kv_bytes: float, source: str) -> Curve:
    """batch_size, step, num_heads, num_key_value_heads, head_dim, latency: GQA decode, one layer."""
    context = column(rows, "step") + 1
    pairs = column(rows, "batch_size") * context * column(rows, "head_dim")
    read = pairs * 2 * column(rows, "num_key_value_heads") * kv_bytes
    return _roofline(read, pairs * 4 * column(rows, "num_heads"), rows, chip, "bf16", source)


def fit_prefill_attention(rows: Sequence[Row], chip: Hardware, source: str) -> Curve:
    """batch_size, isl, num_heads, num_key_value_heads, head_dim, latency: causal prompts, one layer."""
    tokens, length = column(rows, "batch_size") * column(rows, "isl"), column(rows, "isl")
    dim, heads = column(rows, "head_dim"), column(rows, "num_heads")
    read = tokens * 4 * (heads + column(rows, "num_key_value_heads")) * dim
    return _roofline(read, tokens * length * 2 * heads * dim, rows, chip, "bf16", source)


def fit_mla_module(
    rows: Sequence[Row], chip: Hardware, kv_bytes: float, gemm: str, source: str
) -> tuple[Curve, Curve]:
    """num_heads, batch_size, step, latency: a whole DeepSeek-V3 decode attention module. -> (gemm, core) curves;
    the module's launch is the gemm curve's. The heads say how many tensor-parallel ways the module was cut."""
    batch, context, heads = column(rows, "batch_size"), column(rows, "step") + 1, column(rows, "num_heads")
    elems = _MLA_HIDDEN * (1536 + _MLA_ROW) + heads * (1536 * 192 + _MLA_RANK * 256 + 128 * _MLA_HIDDEN)
    read = batch * context * _MLA_ROW * kv_bytes
    pairs = batch * context * heads * 2 * (_MLA_ROW + _MLA_RANK)
    crossed = (
        batch * 2 * (2 * _MLA_HIDDEN + 2 * _MLA_ROW + 1536 + heads * 2 * (2 * 128 + 2 * 64 + 2 * _MLA_RANK))
    )

    def predict(v: Array) -> Array:
        projected = smooth_max(
            elems * PRECISIONS[gemm] / (chip.bandwidth * v[1]), 2 * batch * elems / (chip.flops(gemm) * v[2])
        )
        attended = smooth_max(read / (chip.bandwidth * v[3]), pairs / (chip.flops("bf16") * v[4]))
        return np.asarray(v[0] + projected + attended + crossed * v[5] / chip.bandwidth)

    fit = _fit(predict, rows, [6e-5, 0.8, 0.6, 0.8, 0.8, 2.0], [2.0, 0.2, 0.2, 0.3, 0.3, 1.0])
    v = [float(value) for value in fit.values]
    return (
        Curve(v[0], v[1], v[2], fit.spread, row_bytes=v[5], rows=fit.rows, source=source),
        Curve(0.0, v[3], v[4], fit.spread, rows=fit.rows, source=source),
    )


def fit_experts(rows: Sequence[Row], chip: Hardware, precision: str, source: str) -> Curve:
    """num_tokens, hidden_size, inter_size, topk, num_experts, moe_tp_size, moe_ep_size, distribution, latency:
    grouped expert FFN on one of moe_ep_size devices, tokens counted over all of them."""
    devices = column(rows, "moe_ep_size")
    tokens, top_k, experts = column(rows, "num_tokens"), column(rows, "topk"), column(rows, "num_experts")
    hidden, width = column(rows, "hidden_size"), column(rows, "inter_size") / column(rows, "moe_tp_size")
    elems, grouped = 3 * hidden * width, tokens * top_k / devices
    active = np.clip(_active(rows) / devices, 1.0, np.maximum(np.minimum(grouped, experts / devices), 1.0))

    def predict(v: Array) -> Array:
        traffic = grouped * v[4] * 2 * (2 * hidden + 3 * width)
        moved = (active * elems * PRECISIONS[precision] + traffic) / (chip.bandwidth * v[1])
        computed = 2 * elems * (grouped + v[3] * active) / (chip.flops(precision) * v[2])
        return np.asarray(v[0] + smooth_max(moved, computed) + active * v[5])

    fit = _fit(predict, rows, [5e-5, 0.8, 0.5, 8.0, 1.0, 1e-7], [2.0, 0.02, 0.3, 0.7, 0.7, 1.0])
    v = [float(value) for value in fit.values]
    return Curve(v[0], v[1], v[2], fit.spread, v[3], v[5], v[4], fit.rows, source)


def fit_link(message: Array, seconds: Array, speed: float, source: str) -> Curve:
    """launch + bytes / (speed * memory), for all-reduce, dispatch and combine rows."""
    fit = fit_positive(lambda v: np.asarray(v[0] + message / (speed * v[1])), seconds, np.array([1e-5, 0.5]))
    return Curve(float(fit.values[0]), float(fit.values[1]), 1.0, fit.spread, rows=fit.rows, source=source)


def _active(rows: Sequence[Row]) -> Array:
    """Distinct experts over all devices: all different when `balanced`, else by the named power law."""
    found = []
    for row in rows:
        experts, top_k, tokens = int(row["num_experts"]), int(row["topk"]), float(row["num_tokens"])
        if row["distribution"] == "balanced":
            found.append(min(experts, tokens * top_k))
        else:
            exponent = float(row["distribution"].split("_")[2])
            found.append(float(active_experts(Routing(exponent), experts, top_k, np.array([tokens]))[0]))
    return np.array(found)


def _roofline(
    read: Array, flops: Array, rows: Sequence[Row], chip: Hardware, precision: str, source: str
) -> Curve:
    peak = chip.flops(precision)

    def predict(v: Array) -> Array:
        return np.asarray(v[0] + smooth_max(read / (chip.bandwidth * v[1]), flops / (peak * v[2])))

    fit = _fit(predict, rows, [1e-5, 0.7, 0.5], [2.0, 0.4, 0.4])
    launch, memory, compute = (float(value) for value in fit.values)
    return Curve(launch, memory, compute, fit.spread, rows=fit.rows, source=source)


def _fit(
    predict: Callable[[Array], Array], rows: Sequence[Row], start: list[float], prior: list[float]
) -> Fit:
    return fit_positive(predict, column(rows, "latency") / 1e3, np.array(start), prior_spread=np.array(prior))
