"""Measured configurations other people published: five-fold cross-validation by series, errors by system and batch,
and the plot of them."""

from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path

import numpy as np

from afserve.placement.planner.served import ServedRow
from afserve.placement.planner.served_fit import fit_served
from bench import planner_served
from bench.planner_rows import fold, impossible, read_rows

_OPEN = 1 << 20
REGIONS = ((1, 8), (9, 32), (33, 128), (129, _OPEN))
SPLIT = "five folds by series (model, chip, engine, precision, layout, lengths): no concurrency of a series is fitted"


class Errors:
    """Relative errors of TPOT and TTFT, each row predicted by a fit that saw nothing of its series."""

    def __init__(
        self, rows: Sequence[ServedRow], of: Callable[[ServedRow], int] = fold, only: int | None = None
    ) -> None:
        """`of`: a row's fold. `only`: one fold is predicted, and kept."""
        places = np.array([of(row) for row in rows])
        self.rows = [row for row, place in zip(rows, places) if only in (None, place)]
        self.tpot, self.ttft = np.zeros(len(rows)), np.zeros(len(rows))
        for held in np.unique(places) if only is None else [only]:
            model = fit_served([row for row, place in zip(rows, places) if place != held])
            unseen = [row for row, place in zip(rows, places) if place == held]
            self.tpot[places == held] = model.tpot(unseen) / np.array([row.tpot for row in unseen]) - 1
            self.ttft[places == held] = model.ttft(unseen) / np.array([row.ttft for row in unseen]) - 1
        if only is not None:
            self.tpot, self.ttft = self.tpot[places == only], self.ttft[places == only]

    def beside(self, other: "Errors") -> "Errors":
        """The rows of both, each predicted as it was."""
        both = copy(self)
        both.rows = self.rows + other.rows
        both.tpot, both.ttft = np.r_[self.tpot, other.tpot], np.r_[self.ttft, other.ttft]
        return both

    def medians(self, keep: Callable[[ServedRow], bool] = lambda row: True) -> tuple[int, float, float]:
        chosen = np.array([keep(row) for row in self.rows])
        if not chosen.any():
            return 0, float("nan"), float("nan")
        return int(chosen.sum()), _median(self.tpot[chosen]), _median(self.ttft[chosen])


def _median(errors: np.ndarray) -> float:
    return float(np.median(np.abs(errors)))


def summaries(path: Path, chart: Path | None) -> list[dict[str, object]]:
    """One row per group: how many, median |error| of TPOT and of TTFT."""
    rows, left = read_rows(path)
    mixed = [row for row in rows if not row.disaggregated and not impossible(row)]
    apart = [row for row in rows if row.disaggregated]
    main, second = Errors(mixed), Errors(apart)
    every = main.beside(second)
    found = [_row("all", every, lambda row: True, left)]
    found.append(_row("aggregated", main, lambda row: True))
    found.append(_row("disaggregated, worker counts known", second, lambda row: True))
    for field, label in (("chip", "system"), ("engine", "engine"), ("shape", "model")):
        names = sorted({_name(getattr(row, field)) for row in every.rows})
        found += [_row(f"{label} {name}", every, _is(field, name)) for name in names]
    found += [_row(f"batch {_region(low, high)}", every, _between(low, high)) for low, high in REGIONS]
    new = Errors(mixed, of=lambda row: sorted({other.shape.name for other in mixed}).index(row.shape.name))
    found.append(_row("aggregated, whole model unseen", new, lambda row: True))
    found.append(_row("filed as aggregated, layout impossible", _odd(rows, mixed), lambda row: True))
    found.append(planner_served.summary(mixed))
    if chart is not None:
        plot(every, chart)
    return found


def _odd(rows: Sequence[ServedRow], mixed: Sequence[ServedRow]) -> Errors:
    """The rows that are in no other figure, predicted from all others."""
    odd = [row for row in rows if impossible(row)]
    return Errors([*odd, *mixed], of=lambda row: int(impossible(row)), only=1)


def _row(
    case: str, errors: Errors, keep: Callable[[ServedRow], bool], left: dict[str, int] | None = None
) -> dict:
    count, tpot, ttft = errors.medians(keep)
    row: dict[str, object] = {
        "case": case,
        "rows": count,
        "tpot_error": round(tpot, 4),
        "ttft_error": round(ttft, 4),
    }
    return row | ({"left_out": left, "split": SPLIT} if left else {})


def _is(field: str, name: str) -> Callable[[ServedRow], bool]:
    return lambda row: _name(getattr(row, field)) == name


def _name(value: object) -> str:
    """An engine's own name, with its prompts elsewhere or not; a chip's, a shape's."""
    return value.split()[0] if isinstance(value, str) else str(getattr(value, "name"))  # noqa: B009


def _region(low: int, high: int) -> str:
    return f"{low} to {high}" if high < _OPEN else f"{low} and more"


def _between(low: int, high: int) -> Callable[[ServedRow], bool]:
    return lambda row: low <= row.concurrency <= high


def plot(errors: Errors, path: Path) -> None:
    """Boxes of the relative TPOT error by system and batch region."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    systems = sorted({row.chip.name for row in errors.rows})
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), dpi=130, sharey=False)
    for axis, values, label in zip(axes, (errors.tpot, errors.ttft), ("TPOT", "TTFT")):
        for place, (low, high) in enumerate(REGIONS):
            boxes, where = [], []
            for number, name in enumerate(systems):
                keep = np.array(
                    [row.chip.name == name and low <= row.concurrency <= high for row in errors.rows]
                )
                if keep.any():
                    boxes.append(100 * values[keep])
                    where.append(number + 0.2 * (place - 1.5))
            drawn = axis.boxplot(boxes, positions=where, widths=0.16, showfliers=False, patch_artist=True)
            for patch in drawn["boxes"]:
                patch.set_facecolor(pyplot.get_cmap("viridis")(place / 3.3))
        axis.axhline(0, color="#444444", lw=0.8)
        axis.set_xticks(range(len(systems)), systems)
        axis.set_ylabel(f"predicted / measured {label} - 1, %")
        axis.set_ylim(-100, 150)
        axis.grid(axis="y", alpha=0.3)
    names = ", ".join(_region(low, high) for low, high in REGIONS)
    figure.suptitle(
        f"Unseen configurations; within a system, boxes are {names} concurrent requests", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
