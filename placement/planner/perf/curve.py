"""Efficiency curves: from bytes and FLOPs of one operation to its seconds on a device.

A curve is an affine roofline, t = launch + smooth max(bytes / (bandwidth * memory), FLOPs / (peak * compute)): small
operations cost `launch`, large ones reach the shares `memory` and `compute` of the device's peaks. Example: 1 GB at
3,000 GB/s with memory = 0.8 and launch = 5 us takes 5 + 417 us. `calibrate.py` fits curves to measured rows, with the
spread that becomes the error bar. Other devices are assumed to reach the same shares until they are measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.fields import TableFields

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """launch in seconds; memory and compute as shares of the peaks; spread: standard deviation of the log error.

    row_bytes: how often a row's activations cross memory (products only). For grouped experts only: pad_rows, rows an
    active expert computes in vain (tiles), and per_group, seconds per active expert. For a node's own work on messages
    only: per_row, seconds per row that is packed or unpacked, and per_group, seconds per further peer. bend: for a
    machine's own attention halves, measured over roofline at some numbers of rows. scale: an engine's seconds over the
    kernel's, the launch not counted.
    """

    launch: float
    memory: float
    compute: float
    spread: float = 0.1
    pad_rows: float = 0.0
    per_group: float = 0.0
    row_bytes: float = 1.0
    rows: int = 0
    source: str = ""
    per_row: float = 0.0
    scale: float = 1.0
    bend: tuple[tuple[float, float], ...] = ()

    def bent(self, rows: Array) -> Array | float:
        """What no roofline says of this machine: 1, or interpolated between the sizes that were measured."""
        if not self.bend:
            return 1.0
        sizes, ratios = zip(*self.bend, strict=True)
        return np.asarray(np.interp(np.log(np.maximum(rows, 1e-9)), np.log(sizes), ratios))

    def seconds(self, read: Array, flops: Array, bandwidth: float, peak: float) -> Array:
        """Without the launch: callers add it once per call, not once per layer share."""
        return self.scale * smooth_max(read / (bandwidth * self.memory), flops / (peak * self.compute))


def smooth_max(first: Array, second: Array) -> Array:
    """The 4-norm: between adding the two roofs and taking the larger. It fits H200's MLA and expert kernels best
    among the 2-, 3- and 4-norm; written with squares because a general power is ten times slower."""
    left, right = first * first, second * second
    return np.asarray(np.sqrt(np.sqrt(left * left + right * right)))


_FALLBACK = {
    "fp4": ("int4", "fp8", "bf16"),
    "int4": ("fp4", "fp8", "bf16"),
    "fp8": ("bf16",),
    "bf16": ("fp8",),
}
_KINDS = {"sparse": "mla", "mfa": "mla", "window": "gqa", "linear": "gqa"}


class CurveSet:
    """Curves by name, such as `core.mla.fp8`; a missing precision falls back to the nearest one that is there.

    MFA has one key-value head for all queries, as absorbed MLA has, and borrows its curve. most: the requests and the
    tokens of context of the largest steps that were measured on one's own machine. models: what it was measured with,
    where that is one machine's own; runs: what was served there with experts apart, rows of a calibration; whole: the
    curves of decode steps that are one native call, where they were measured.
    """

    def __init__(
        self,
        name: str,
        curves: Mapping[str, Curve],
        model_spread: float,
        checked: tuple[str, ...] = (),
        most: tuple[float, float] = (float("inf"), float("inf")),
    ) -> None:
        self.name = name
        self.curves = dict(curves)
        self.model_spread = model_spread
        self.checked = checked
        self.most = most
        self.models: tuple[str, ...] = ()
        self.runs: tuple[Mapping[str, float], ...] = ()
        self.whole: CurveSet | None = None
        self._picked: dict[tuple[str, str, str], Curve] = {}

    def spread_on(self, hardware: str) -> float:
        """Standard deviation of the whole model's log error; twice as much on hardware it was never checked on, and a
        factor of e on CPU hosts, whose kernels have nothing in common with a GPU's."""
        if not self.checked or hardware in self.checked:
            return self.model_spread
        return 1.0 if hardware.lower().startswith("cpu") else 2 * self.model_spread

    def of_experts(self, isa: str, precision: str) -> Curve:
        """Of a CPU's instructions where there are rows of them, else of GPU kernels, or of one's own machine."""
        return self._known(f"experts.{isa}", precision) or self.pick("experts", precision)

    def knows(self, isa: str) -> bool:
        """Whether there are rows of experts with a CPU's instructions."""
        return self._known(f"experts.{isa}", "bf16") is not None

    def pick(self, operation: str, precision: str, kind: str = "") -> Curve:
        """A search picks the same few a hundred thousand times, so `curves` are not changed once one was picked."""
        key = operation, precision, kind
        if (found := self._picked.get(key)) is None:
            names = [_KINDS.get(kind, kind)] if kind else []
            found = self._known(".".join([operation, *names]), precision) or self.curves[operation]
            self._picked[key] = found
        return found

    def _known(self, name: str, precision: str) -> Curve | None:
        """At this precision or the nearest one that is there."""
        tried = (precision, *_FALLBACK.get(precision, ()))
        return next((self.curves[f"{name}.{one}"] for one in tried if f"{name}.{one}" in self.curves), None)


def of_isa(name: str) -> bool:
    """Whether a curve is that of a CPU's instructions, such as `experts.avx2.int4`."""
    operation, *parts = name.split(".")
    return operation == "experts" and len(parts) > 1


def curves_from_table(source: str, table: Mapping[str, object]) -> CurveSet:
    """Read `[curve."NAME"]` tables of a fits file."""
    fields = TableFields(source, table)
    meta, curves = fields.section("meta"), fields.section("curve")
    return CurveSet(
        meta.text("name"),
        {name: _curve(curves.section(name)) for name in curves.table},
        meta.number("model_spread", 0.15),
        tuple(str(name) for name in meta.items("checked")),
    )


def _curve(fields: TableFields) -> Curve:
    return Curve(
        launch=fields.number("launch_us", 0.0) * 1e-6,
        memory=fields.number("memory", 1.0, least=1e-3),
        compute=fields.number("compute", 1.0, least=1e-3),
        spread=fields.number("spread", 0.1),
        pad_rows=fields.number("pad_rows", 0.0),
        per_group=fields.number("per_group_us", 0.0) * 1e-6,
        row_bytes=fields.number("row_bytes", 1.0),
        rows=fields.integer("rows", 0),
        source=fields.text("source", ""),
    )
