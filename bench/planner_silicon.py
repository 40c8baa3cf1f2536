"""Measured configurations other people published: five-fold cross-validation by series, errors by system and batch,
and the plot of them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from afserve.placement.served import ServedRow
from afserve.placement.served_fit import fit_served
from bench.planner_rows import fold, read_rows

FOLDS = 5
REGIONS = ((1, 8), (9, 32), (33, 128), (129, 1 << 20))
SPLIT = "five folds by series (model, chip, engine, precision, layout, lengths): no concurrency of a series is fitted"


class Errors:
    """Relative errors of TPOT and TTFT, each row predicted by a fit that saw nothing of its series."""

    def __init__(self, rows: Sequence[ServedRow], of: Callable[[ServedRow], int] = fold) -> None:
        self.rows = list(rows)
        self.tpot, self.ttft = np.zeros(len(rows)), np.zeros(len(rows))
        places = np.array([of(row) for row in rows])
        for held in np.unique(places):
            model = fit_served([row for row, place in zip(rows, places) if place != held])
            unseen = [row for row, place in zip(rows, places) if place == held]
            self.tpot[places == held] = model.tpot(unseen) / np.array([row.tpot for row in unseen]) - 1
            self.ttft[places == held] = model.ttft(unseen) / np.array([row.ttft for row in unseen]) - 1

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
    mixed = [row for row in rows if not row.disaggregated]
    apart = [row for row in rows if row.disaggregated]
    main, second = Errors(mixed), Errors(apart)
    found = [_row("aggregated, all", main, lambda row: True, left)]
    found += [
        _row(f"system {name}", main, _is("chip", name)) for name in sorted({row.chip.name for row in mixed})
    ]
    found += [
        _row(f"engine {name}", main, _is("engine", name)) for name in sorted({row.engine for row in mixed})
    ]
    found += [
        _row(f"model {name}", main, _is("shape", name)) for name in sorted({row.shape.name for row in mixed})
    ]
    found += [_row(f"batch {low} to {high}", main, _between(low, high)) for low, high in REGIONS]
    found.append(_row("disaggregated, worker counts known", second, lambda row: True))
    new = Errors(mixed, of=lambda row: sorted({other.shape.name for other in mixed}).index(row.shape.name))
    found.append(_row("aggregated, whole model unseen", new, lambda row: True))
    if chart is not None:
        plot(main, chart)
    return found


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
    def same(row: ServedRow) -> bool:
        value = getattr(row, field)
        return (value if isinstance(value, str) else value.name) == name

    return same


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
    names = ", ".join(f"{low}-{high if high < 1 << 20 else ''}" for low, high in REGIONS)
    figure.suptitle(
        f"Unseen configurations; within a system, boxes are {names} concurrent requests", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
