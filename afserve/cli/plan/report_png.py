"""Pictures of a plan, for slides and messages: its report (verdict, Pareto front, stages, tornado), and the Pareto
chart of `--chart`, the objective against the speed that one request sees.

matplotlib (the `plot` extra) draws them, without a display. What is assumed, and the tables, are on the page and in the
JSON only. The same as pages is in `report_page.py`.
"""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from afserve.cli.plan.report import Measure, PlanReport, optimised
from afserve.cli.plan.report_page import COLOURS, KINDS, NAMES, SAID, amount, rate, shown_swings, stages
from afserve.errors import ConfigError, shown
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question


def pyplot_for(option: str, path: Path) -> Any:
    """matplotlib's pyplot, to write `path`. Raises ConfigError where it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(
            f"--{option} {shown(str(path))}: matplotlib is not installed; pip install 'afserve[plot]', or ask for "
            ".html"
        ) from error
    mpl.use("agg")
    from matplotlib import pyplot

    return pyplot


def pareto_png(path: Path, question: Question, curves: Mapping[str, Sequence[Plan]]) -> None:
    pyplot = pyplot_for("chart", path)
    figure, axes = pyplot.subplots(figsize=(7.6, 4.6), dpi=150)
    height = optimised(question.objective)
    for kind, plans in curves.items():
        speed = [1 / plan.tpot for plan in plans]
        value = [height.of(plan) for plan in plans]
        spread = [plan.error * height.of(plan) for plan in plans]
        axes.errorbar(
            speed,
            value,
            yerr=spread,
            marker="o",
            ms=4,
            lw=1.5,
            elinewidth=0.6,
            capsize=2,
            color=COLOURS[kind],
            label=NAMES[kind],
        )
    if question.targets.tpot < float("inf"):
        wanted = 1 / question.targets.tpot
        axes.axvline(wanted, color="#888888", lw=0.8, ls="--", label=f"target: {wanted:,.3g} tok/s each")
    axes.set_xlabel("tokens per second and request")
    axes.set_ylabel(height.label)
    axes.set_title(f"{question.setting.shape.name}\n{question.setting.workload.name}", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--chart {path}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


_COLOURS = {
    "colocated": "#0072b2",
    "afd": "#b84a00",
    "compute": "#009e73",
    "moved": "#7f7f7f",
    "low": "#cc79a7",
    "high": "#8a6d00",
}
_MARKS = "os^Dv<>PX*"


def write_png(path: Path, report: PlanReport) -> None:
    """Raises ConfigError where matplotlib is not installed, or the file cannot be written."""
    pyplot = pyplot_for("report", path)
    heights = report.heights
    figure, panels = pyplot.subplots(
        len(heights) + 2,
        1,
        figsize=(8, 7 + 3.6 * len(heights)),
        dpi=150,
        height_ratios=(*[4] * len(heights), 1.6, 4),
        layout="constrained",
    )
    setting = report.question.setting
    conclusion = report.verdict.partition(". ")[0].rstrip(".")  # the page has all of it
    title = f"{setting.shape.name}, {setting.workload.name}\n{textwrap.fill(conclusion, 100)}"
    figure.suptitle(title, fontsize=9, x=0.02, ha="left", parse_math=False)
    for axes, height in zip(panels, heights, strict=False):
        _front(axes, report, height)
    _stages(panels[-2], report)
    _tornado(panels[-1], report)
    try:
        figure.savefig(path, metadata={"Software": "afserve"})
    except OSError as error:
        raise ConfigError(f"--report {shown(str(path))}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def _split_of(plan: Plan) -> str:
    """A plan's kind and the hardware of its sides, the same for all counts of devices."""
    sides = (plan.prefill, plan.attention, plan.experts if plan.kind == "afd" else None)
    return f"{KINDS[plan.kind]} on {' + '.join(side.hardware for side in sides if side is not None)}"


def _front(axes: Any, report: PlanReport, height: Measure) -> None:
    splits = dict.fromkeys(_split_of(plan) for plans in report.front.values() for plan in plans)
    marks = dict(zip(splits, itertools.cycle(_MARKS)))
    for kind, plans in report.front.items():
        axes.plot([1 / plan.tpot for plan in plans], list(map(height.of, plans)), color=_COLOURS[kind])
        for split in dict.fromkeys(map(_split_of, plans)):
            of_split = [plan for plan in plans if _split_of(plan) == split]
            users, up = [1 / plan.tpot for plan in of_split], list(map(height.of, of_split))
            axes.plot(users, up, marks[split], ms=5, color=_COLOURS[kind], label=split)
    best = report.best
    axes.plot(1 / best.tpot, height.of(best), "o", ms=13, mfc="none", color="black", label="chosen plan")
    if report.wanted is not None:
        label = f"target: {rate(report.wanted)} tokens per second and user"
        axes.axvline(report.wanted, color="#888888", lw=0.8, ls="--", label=label)
    axes.set_xlabel("tokens per second and user")
    axes.set_ylabel(height.label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _stages(axes: Any, report: PlanReport) -> None:
    for name, seconds, kind in reversed(stages(report.best)):
        axes.barh(name, seconds * 1e6, color=_COLOURS[kind], label=SAID[kind])
        axes.text(seconds * 1e6, name, f" {seconds * 1e6:,.1f} us", fontsize=7, va="center")
    axes.margins(x=0.12)
    axes.set_xlabel("microseconds of one layer of one micro-batch")
    _legend(axes)


def _tornado(axes: Any, report: PlanReport) -> None:
    planned = report.best.tok_s_per_device
    axes.axvline(planned, color="black", lw=1)
    swings = shown_swings(report)[::-1]
    for place, swing in enumerate(swings):
        ends = (("low", 0.2, swing.low, swing.at_low), ("high", -0.2, swing.high, swing.at_high))
        for end, above, value, found in ends:
            width = (found or 0.0) - planned
            axes.barh(place + above, width, 0.36, left=planned, color=_COLOURS[end], label=SAID[end])
            said = f" {amount(swing, value)}: {'misses the target' if found is None else rate(found)}"
            axes.text(max(found or 0.0, planned), place + above, said, fontsize=7, va="center")
    axes.set_yticks(range(len(swings)), [f"{swing.name} ({swing.unit})" for swing in swings])
    axes.margins(x=0.2)
    axes.set_xlabel(f"tokens per second and device; as planned {rate(planned)}")
    _legend(axes)


def _legend(axes: Any) -> None:
    """Each colour once."""
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(*zip(*dict(zip(labels, zip(handles, labels))).values()), fontsize=7)
