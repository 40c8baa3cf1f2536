"""The Pareto chart of `afserve plan --chart` as a picture: the objective against the speed that one request sees.

Through matplotlib (the `plot` extra). The same as a page is in `report_page.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from afserve.cli.plan.drawing import pyplot_for
from afserve.cli.plan.measure import optimised
from afserve.cli.plan.report_page import COLOURS, NAMES
from afserve.errors import ConfigError
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question


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
