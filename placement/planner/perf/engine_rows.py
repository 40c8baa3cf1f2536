"""Rows that were measured of an engine, and what they say of a question like them.

Likeness is 1 for the same model, chip, precision, layout, lengths and requests, and falls with every difference. The
errors that a fit leaves on rows alike are expected again (a Gaussian process with that likeness as its covariance), and
their size is the width of the interval. It knows no physics: rows come with the errors that were left.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SIGNAL = 0.25
"""Spread of the errors that rows alike share."""
REACH = {"tpot": 1.0, "ttft": 0.5}
"""Powers of likeness. Errors of first tokens are larger and are shared by rows that are less alike."""
UNLIKE = {"model": 1.5, "chip": 0.8, "experts": 0.7, "layout": 0.7, "prompts": 1.0, "drafts": 1.5}
"""How much less alike two rows are that differ so: exp(-sum)."""
REQUESTS, LENGTHS, DEVICES = 3.0, 3.0, 1.5
"""Standard deviations of likeness, in doublings."""
SHARE = {"model": 2.0, "chip": 0.3, "experts": 3.0, "layout": 1.0, "prompts": 1.2, "drafts": 2.0}
SHARE_REQUESTS = 1.75
"""The same for what of their errors rows share, which is what corrections are made of: kernels of one precision are off
alike on all chips, those of two hardly. The size of errors, and so the interval, goes by likeness."""
FAR, FAR_WEIGHT = 0.16, 0.5
"""Error assumed far from every row, and its weight beside the likeness of rows."""
NEW = 0.4
"""What a question like no row at all adds. So the 80 % interval holds 84 % of rows of models that a fit has not seen,
and 78 % of chips; with 0 it held 36 % and 53 %."""
MANY = 128
"""Requests in flight beyond which errors have a quantile of their own."""
BEARS = 0.11
"""Likeness from which a row bears on a question: less is another model on another chip."""
OFF = "off"
_MOST_REQUESTS, _MOST_DEVICES, _DEVICE_STEP = 23, 13, 0.5


@dataclass(frozen=True, slots=True)
class Like:
    """What a question is like: names, and lengths in tokens. layout: dp, tp or afd, and how experts are split.
    prompts: here or elsewhere. drafts: off, or who drafted (mtp): rows of both modes are not taken for each other."""

    model: str
    chip: str
    experts: str
    layout: str
    prompts: str
    prompt: float
    answer: float
    drafts: str = OFF

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(getattr(self, name) for name in UNLIKE)

    @property
    def labels(self) -> tuple[str, ...]:
        return (
            f"chip {self.chip}",
            f"model {self.model}",
            f"experts {self.experts}",
            f"prompts {self.prompts}",
        )


def likeness_of(name: str) -> float:
    """What a difference in that name alone leaves of the likeness."""
    return float(np.exp(-UNLIKE[name]))


@dataclass(frozen=True, slots=True)
class ClosestRow:
    """The measured row most like a question, and how much: 1 is the same."""

    likeness: float
    like: Like
    requests: float
    devices: float

    def __str__(self) -> str:
        one = self.like
        where = f"{self.devices:.0f} {one.chip}, {one.layout}, {self.requests:,.0f} requests"
        return f"{one.model} {one.experts} on {where}"


def _none() -> Array:
    return np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRows:
    """One entry per row. tpot, ttft: weights of the corrections (bench/planner_alike.py learns them). wrong: log errors
    of TPOT that a fit without the row's series leaves. quantile: errors over `FAR`-padded local errors, at 80 %;
    quantile_many: of rows with more than `MANY` requests in flight."""

    like: tuple[Like, ...] = ()
    requests: Array = field(default_factory=_none)
    devices: Array = field(default_factory=_none)
    tpot: Array = field(default_factory=_none)
    ttft: Array = field(default_factory=_none)
    wrong: Array = field(default_factory=_none)
    quantile: float = 1.0
    quantile_many: float = 1.0

    def alike(self, like: Like, requests: float, devices: float) -> Array:
        """The likeness of each row to this question."""
        ends = _ends(self, like)
        return np.asarray(
            ends
            * _near(self.requests, np.log2(max(requests, 1.0)), REQUESTS)
            * _near(self.devices, np.log2(max(devices, 1.0)), DEVICES)
        )

    @property
    def drafted(self) -> bool:
        """Whether any was measured with drafts."""
        return _drafted(self)

    def nearest(self, like: Like, most_devices: float) -> float:
        """The likeness of the row most like this one, whatever its requests; rows of more devices than there are to be
        had are as much less alike as the best layout would differ from them."""
        nearest = np.minimum(self.devices, np.log2(max(most_devices, 1.0)))
        fits = _near(self.devices, nearest, DEVICES)
        return float((_ends(self, like) * fits).max(initial=0.0))

    def closest(self, like: Like, requests: float, devices: float) -> "ClosestRow | None":
        """The row most like this question; None without rows."""
        if not self.like:
            return None
        alike = self.alike(like, requests, devices)
        at = int(np.argmax(alike))
        counts = (float(np.exp2(numbers[at])) for numbers in (self.requests, self.devices))
        return ClosestRow(float(alike[at]), self.like[at], *counts)

    def half_width(self, like: Like, requests: float, devices: float) -> float:
        quantile = self.quantile_many if requests > MANY else self.quantile
        return quantile * float(local_error(self.alike(like, requests, devices)[None, :], self.wrong)[0])


@lru_cache(maxsize=64)
def _drafted(rows: MeasuredRows) -> bool:
    return any(like.drafts != OFF for like in rows.like)


def local_error(alike: Array, wrong: Array) -> Array:
    """The mean size of errors around each question, and more where no row is like it. `alike` is (questions, rows)."""
    total = alike @ np.abs(wrong) + FAR * FAR_WEIGHT
    new = NEW * (1 - alike.max(axis=1)) ** 2
    return np.asarray(total / (alike.sum(axis=1) + FAR_WEIGHT) + new)


def _near(values: Array, at: Array | float, deviation: float) -> Array:
    return np.asarray(np.exp(-(((values - at) / deviation) ** 2) / 2))


@lru_cache(maxsize=512)
def _ends(rows: MeasuredRows, like: Like, shared: bool = False) -> Array:
    """The part of the likeness that does not depend on requests and devices; shared: of what errors share."""
    exponent = np.zeros(len(rows.like))
    names, lengths = _columns(rows)
    costs = (SHARE if shared else UNLIKE).values()
    for cost, known, name in zip(costs, names, like.names, strict=True):
        exponent += cost * (known != name)
    for doublings, length in zip(lengths, (like.prompt, like.answer), strict=True):
        exponent += ((doublings - np.log2(length)) / LENGTHS) ** 2 / 2
    return np.asarray(np.exp(-exponent))


@lru_cache(maxsize=64)
def _columns(rows: MeasuredRows) -> tuple[tuple[NDArray[np.str_], ...], tuple[Array, Array]]:
    """Names of all rows, by kind of name, and the doublings of their lengths: of prompts, of answers."""
    names = tuple(np.array([getattr(row, name) for row in rows.like], np.str_) for name in UNLIKE)
    prompts = np.log2([row.prompt for row in rows.like])
    return names, (prompts, np.log2([row.answer for row in rows.like]))


@lru_cache(maxsize=512)
def like_grid(rows: MeasuredRows, like: Like, what: str) -> Callable[[Array, Array], Array]:
    """The expected log error by (requests, devices): a table over doublings of both, read between its points."""
    weights = getattr(rows, what)
    if not len(weights):
        return lambda requests, devices: np.zeros(np.broadcast_shapes(np.shape(requests), np.shape(devices)))
    steps = np.arange(0.0, _MOST_DEVICES, _DEVICE_STEP)
    reach = REACH[what]
    by_requests = _near(rows.requests, np.arange(float(_MOST_REQUESTS))[:, None], SHARE_REQUESTS) ** reach
    by_devices = _near(rows.devices, steps[:, None], DEVICES) ** reach
    table = SIGNAL**2 * (by_requests * (_ends(rows, like, shared=True) ** reach * weights)) @ by_devices.T

    def read(requests: Array, devices: Array) -> Array:
        across = np.minimum(np.log2(np.maximum(requests, 1.0)), _MOST_REQUESTS - 1.001)
        along = np.minimum(np.log2(np.maximum(devices, 1.0)), _MOST_DEVICES - 1.001) / _DEVICE_STEP
        i, j = np.floor(across).astype(np.int64), np.floor(along).astype(np.int64)
        j = np.minimum(j, len(steps) - 2)
        a, b = across - i, along - j
        low = table[i, j] * (1 - b) + table[i, j + 1] * b
        high = table[i + 1, j] * (1 - b) + table[i + 1, j + 1] * b
        return np.asarray(low * (1 - a) + high * a)

    return read
