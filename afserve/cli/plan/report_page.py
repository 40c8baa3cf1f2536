"""Pages of a plan that need nothing else: the report, and the Pareto chart of `--chart`. What they look like is in the
templates beside this file; here are the numbers and words that both pages and pictures are made of.

Whatever came from outside (names of models, hardware and files, notes of profiles) is escaped.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from afserve.cli.plan.heard import HEAD, RULE
from afserve.cli.plan.report import Measure, PlanReport, optimised
from afserve.placement.planner.infeasible import describe
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question
from afserve.placement.planner.tornado import TIMES, Swing

KINDS = {"colocated": "colocated", "afd": "AFD"}
SAID = {
    "compute": "computing",
    "moved": "moving rows",
    "low": "at the low value",
    "high": "at the high value",
}
"""What the colours of bars mean."""
COLOURS = {"colocated": "#4063d8", "afd": "#cb3c33"}
NAMES = {"colocated": "colocated", "afd": "attention and experts apart"}
"""Of the chart, which is older than the report."""
_SEEN = 1e-3  # of the planned rate: a shorter bar is no bar


@dataclass(frozen=True, slots=True)
class PlotFrame:
    """Where numbers from `least_x` and 0 to the most are drawn: pixels of a figure."""

    left: float
    right: float
    top: float
    bottom: float
    most_x: float
    most_y: float = 1.0
    least_x: float = 0.0

    def x(self, value: float) -> float:
        return self.left + (value - self.least_x) / (self.most_x - self.least_x) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - value / self.most_y * (self.bottom - self.top)


def report_html(report: PlanReport) -> str:
    return _PAGES.get_template("report.html.jinja").render(report=report)


def chart_html(question: Question, curves: Mapping[str, Sequence[Plan]]) -> str:
    plans = [plan for found in curves.values() for plan in found]
    height = optimised(question.objective)
    right = max((1 / plan.tpot for plan in plans), default=1.0) * 1.05
    top = max((height.of(plan) * (1 + plan.error) for plan in plans), default=1.0) * 1.05
    frame = PlotFrame(64, 728, 32, 396, right, top)
    given = {"question": question, "curves": curves, "height": height, "frame": frame}
    return _PAGES.get_template("chart.html.jinja").render(given, colours=COLOURS, names=NAMES)


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def amount(swing: Swing, value: float) -> str:
    if swing.names:
        return swing.names[(swing.low, swing.planned, swing.high).index(value)]
    return f"x {value:.2f}" if swing.unit == TIMES else f"{value:,.4g}"


def shown_swings(report: PlanReport) -> list[Swing]:
    """Those whose bars can be seen, the largest first."""
    planned = report.best.tok_s_per_device
    return [swing for swing in report.swings if swing.effect(planned) > _SEEN * planned]


def stages(plan: Plan) -> tuple[tuple[str, float, str], ...]:
    """(name, seconds, whether it computes or is moved) of one layer of one micro-batch."""
    times = plan.stages
    return (
        ("attention", times.attention, "compute"),
        ("dispatch", times.dispatch, "moved"),
        ("experts", times.experts, "compute"),
        ("combine", times.combine, "moved"),
    )


def _frame_of(report: PlanReport, measured: Measure) -> PlotFrame:
    plans = [report.best, *(plan for found in report.front.values() for plan in found)]
    most_x, most_y = max(1 / plan.tpot for plan in plans), max(map(measured.of, plans))
    return PlotFrame(70, 730, 40, 370, 1.06 * most_x, 1.06 * most_y)


def _bar_frame_of(report: PlanReport) -> PlotFrame:
    planned = report.best.tok_s_per_device
    ends = [planned, *(end or 0.0 for swing in report.swings for end in (swing.at_low, swing.at_high))]
    least, most = min(ends), max(ends)
    return PlotFrame(290, 670, 0, 0, max(most, least + 1e-9 * max(most, 1.0)), least_x=least)


def _ticks(most: float) -> Iterator[float]:
    """Four to ten round numbers from 0 to `most`."""
    power = 10.0 ** math.floor(math.log10(most))
    step = next(part * power for part in (0.1, 0.2, 0.5, 1.0, 2.0) if most / (part * power) <= 10)
    yield from (step * number for number in range(int(most / step) + 1))


def _escaped(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(escape(str(value)))  # noqa: S704


_PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    finalize=_escaped,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_PAGES.globals |= {
    "KINDS": KINDS, "SAID": SAID, "amount": amount, "bar_frame_of": _bar_frame_of, "describe": describe,
    "endless": math.inf, "frame_of": _frame_of, "rate": rate, "shown_swings": shown_swings, "stages": stages,
    "ticks": _ticks, "HEARD": HEAD, "LIKENESS": RULE,
}  # fmt: skip
