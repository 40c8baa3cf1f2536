"""A plan's report as one picture, for slides and messages: verdict, Pareto front, stages, tornado.

matplotlib (the `plot` extra) draws it. What is assumed, and the tables, are on the page and in the JSON only.
"""

import textwrap
from pathlib import Path
from typing import Any

from afserve.cli.drawing import pyplot_for
from afserve.cli.report import PlanReport
from afserve.cli.report_figures import KINDS, amount, rate, stages
from afserve.errors import ConfigError, shown

_COLOURS = {
    "colocated": "#0072b2",
    "afd": "#b84a00",
    "compute": "#0072b2",
    "moved": "#b84a00",
    "low": "#b84a00",
    "high": "#0072b2",
}
_MARKS = {"colocated": "o", "afd": "s"}


def write_png(path: Path, report: PlanReport) -> None:
    """Raises ConfigError where matplotlib is not installed, or the file cannot be written."""
    pyplot = pyplot_for("report", path)
    figure, (front, layer, swings) = pyplot.subplots(
        3, 1, figsize=(8, 11), dpi=150, height_ratios=(4, 1.6, 4), layout="constrained"
    )
    setting = report.question.setting
    words = "\n".join(textwrap.wrap(report.verdict, 100))
    title = f"{setting.shape.name}, {setting.workload.name}\n{words}"
    figure.suptitle(title, fontsize=9, parse_math=False)
    _front(front, report)
    _stages(layer, report)
    _tornado(swings, report)
    try:
        figure.savefig(path, metadata={"Software": "afserve"})
    except OSError as error:
        raise ConfigError(f"--report {shown(str(path))}: {error.strerror}", param="report") from error
    finally:
        pyplot.close(figure)


def _front(axes: Any, report: PlanReport) -> None:
    for kind, plans in report.front.items():
        users, devices = [1 / plan.tpot for plan in plans], [plan.tok_s_per_device for plan in plans]
        axes.plot(users, devices, marker=_MARKS[kind], ms=5, color=_COLOURS[kind], label=KINDS[kind])
    best = report.best
    axes.plot(
        1 / best.tpot, best.tok_s_per_device, "o", ms=13, mfc="none", color="black", label="chosen plan"
    )
    if report.wanted is not None:
        axes.axvline(report.wanted, color="#888888", lw=0.8, ls="--")
    axes.set_xlabel("tokens per second and user")
    axes.set_ylabel("tokens per second and device")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _stages(axes: Any, report: PlanReport) -> None:
    for name, seconds, kind in reversed(stages(report.best)):
        axes.barh(name, seconds * 1e6, color=_COLOURS[kind])
    axes.set_xlabel("us of one layer of one micro-batch")


def _tornado(axes: Any, report: PlanReport) -> None:
    planned = report.best.tok_s_per_device
    axes.axvline(planned, color="black", lw=1)
    for place, swing in enumerate(reversed(report.swings)):
        ends = (("low", 0.2, swing.low, swing.at_low), ("high", -0.2, swing.high, swing.at_high))
        for end, above, value, found in ends:
            axes.barh(place + above, (found or 0.0) - planned, 0.36, left=planned, color=_COLOURS[end])
            said = f" {amount(swing, value)}: {'misses the target' if found is None else rate(found)}"
            axes.text(max(found or 0.0, planned), place + above, said, fontsize=7, va="center")
    axes.set_yticks(range(len(report.swings)), [swing.name for swing in reversed(report.swings)])
    axes.margins(x=0.2)
    axes.set_xlabel(f"tokens per second and device; as planned {rate(planned)}")
