"""Served configurations that other people published, asked one by one through `afserve plan`: errors of TPOT and TTFT
and how often the printed 80 % interval holds the measured TPOT, for rows that the profile was not fitted to."""

import io
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.planner_engines import FOLDS, SERVED, evidence_of, fitted, rows_of, write
from bench.planner_more_rows import ELSEWHERE
from bench.planner_rows import fold, unsaid
from bench.planner_served import ServedRow
from bench.planner_typed import say, typed_row

_OPEN = 1 << 20
REGIONS = ((1, 8), (9, 32), (33, 128), (129, _OPEN))
SPLIT = (
    "folds by series (model, chip, engine, precision, layout, lengths): no concurrency of a series is fitted"
)


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """Relative errors of rows that were asked; held: whether the interval holds the measured TPOT. refused: rows that
    the command refuses, because their weights do not fit as filed."""

    rows: tuple[ServedRow, ...]
    tpot: np.ndarray
    ttft: np.ndarray
    held: np.ndarray
    refused: int

    def some(self, keep: Callable[[ServedRow], bool]) -> "Errors":
        at = [place for place, row in enumerate(self.rows) if keep(row)]
        kept = tuple(self.rows[place] for place in at)
        return Errors(kept, self.tpot[at], self.ttft[at], self.held[at], 0)


def asked(rows: Sequence[ServedRow], profile: str) -> Errors:
    """What the command says of `rows` with `profile`, a name or a file."""
    kept, tpot, ttft, held, refused = [], [], [], [], 0
    for row in rows:
        try:
            with redirect_stderr(io.StringIO()):
                best = say(typed_row(row, profile))["best"]
        except RuntimeError:
            refused += 1
            continue
        assert isinstance(best, dict)
        low, high = best["tpot_interval_80_ms"]
        kept.append(row)
        tpot.append(best["tpot_ms"] / 1e3 / row.tpot - 1)
        told = row.ttft and best["ttft_ms"]
        ttft.append(told / 1e3 / row.ttft - 1 if told else np.nan)
        held.append(low <= row.tpot * 1e3 <= high)
    return Errors(tuple(kept), np.array(tpot), np.array(ttft), np.array(held), refused)


def every_fold(data: Path, told: Callable[[str], None] = print) -> tuple[Errors, Errors]:
    """(the fold that the shipped profiles were not fitted to, asked of them; every row, asked of profiles that were
    fitted to the other four folds)."""
    found, parts = rows_of(data), []
    with tempfile.TemporaryDirectory() as folder:
        for name in SERVED:
            evidence = evidence_of(name, found[name])
            for unseen in range(FOLDS):
                profile = name
                if unseen:
                    write(fitted(name, evidence, unseen), Path(folder))
                    profile = str(Path(folder) / f"{name}.json")
                mine = [row for row in found[name] if fold(row, FOLDS) == unseen and not unsaid(row)]
                parts.append(asked(mine, profile))
                told(f"{name}, fold {unseen}: {len(parts[-1].rows)} rows")
    return joined(parts[::FOLDS]), joined(parts)


def joined(parts: Sequence[Errors]) -> Errors:
    tpot, ttft, held = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("tpot", "ttft", "held")
    )
    rows = tuple(row for part in parts for row in part.rows)
    return Errors(rows, tpot, ttft, held, sum(part.refused for part in parts))


def summaries(errors: Errors, claim: str) -> list[dict[str, object]]:
    """One row per group: how many, median |error| of TPOT and of TTFT, share inside the interval."""
    groups: dict[str, Callable[[ServedRow], bool]] = {
        "all": lambda row: True,
        "aggregated": lambda row: not row.disaggregated,
        "disaggregated, worker counts known": lambda row: row.disaggregated,
        "the public table": lambda row: not row.series.startswith(ELSEWHERE),
        "other sources": lambda row: row.series.startswith(ELSEWHERE),
    }
    labels: dict[str, Callable[[ServedRow], str]] = {
        "system": _system,
        "engine": _engine,
        "model": lambda row: row.shape.name,
    }
    for label, name_of in labels.items():
        for name in sorted({name_of(row) for row in errors.rows}):
            groups[f"{label} {name}"] = partial(_is_named, name_of, name)
    for low, high in REGIONS:
        groups[f"batch {_region(low, high)}"] = partial(_in_batch, low, high)
    found = [_summary(claim, case, errors.some(keep)) for case, keep in groups.items()]
    found[0] |= {"refused": errors.refused, "split": SPLIT}
    return found


def _is_named(name_of: Callable[[ServedRow], str], name: str, row: ServedRow) -> bool:
    return name_of(row) == name


def _in_batch(low: int, high: int, row: ServedRow) -> bool:
    return low <= row.concurrency <= high


def _system(row: ServedRow) -> str:
    return row.chip.name


def _engine(row: ServedRow) -> str:
    return row.engine.split()[0]


def _summary(claim: str, case: str, errors: Errors) -> dict[str, object]:
    known = errors.ttft[np.isfinite(errors.ttft)]
    return {
        "claim": claim,
        "case": case,
        "rows": len(errors.rows),
        "tpot_error": round(float(np.median(np.abs(errors.tpot))), 4),
        "ttft_error": round(float(np.median(np.abs(known))), 4) if len(known) else None,
        "inside_80": round(float(errors.held.mean()), 3),
    }


def _region(low: int, high: int) -> str:
    return f"{low} to {high}" if high < _OPEN else f"{low} and more"


def plot(errors: Errors, path: Path) -> None:
    """Boxes of the relative errors by system and batch region."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    systems = sorted({row.chip.name for row in errors.rows})
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), dpi=130, sharey=False)
    for axis, what, label in zip(axes, ("tpot", "ttft"), ("TPOT", "TTFT")):
        for place, (low, high) in enumerate(REGIONS):
            boxes, where = [], []
            for number, name in enumerate(systems):
                of_system = errors.some(partial(_is_named, _system, name))
                chosen = of_system.some(partial(_in_batch, low, high))
                values = getattr(chosen, what)
                if np.isfinite(values).any():
                    boxes.append(100 * values[np.isfinite(values)])
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
