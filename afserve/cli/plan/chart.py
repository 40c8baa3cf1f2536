"""The Pareto chart of `afserve plan --chart`: the objective against the speed that one request sees.

PNG through matplotlib (the `plot` extra); HTML as one self-contained file with inline SVG and no script.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from afserve.cli.plan.drawing import pyplot_for
from afserve.cli.plan.measure import Measure, optimised
from afserve.errors import ConfigError
from afserve.placement.planner.infeasible import describe
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question

_COLOURS = {"colocated": "#4063d8", "afd": "#cb3c33"}
_NAMES = {"colocated": "colocated", "afd": "attention and experts apart"}
_WIDTH, _HEIGHT, _MARGIN = 760, 460, 64
Curves = Mapping[str, Sequence[Plan]]


def pareto_png(path: Path, question: Question, curves: Curves) -> None:
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
            color=_COLOURS[kind],
            label=_NAMES[kind],
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
        raise ConfigError(f"--chart {path}: {error.strerror}", param="chart") from error
    finally:
        pyplot.close(figure)


def pareto_html(question: Question, curves: Curves) -> str:
    title = f"{question.setting.shape.name}, {question.setting.workload.name}"
    rows = "\n".join(_table_row(plan) for plans in curves.values() for plan in plans)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>
<style>body{{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;color:#222}}
table{{border-collapse:collapse;width:100%}}td,th{{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #ddd}}
td:first-child,th:first-child{{text-align:left}}svg text{{font:12px system-ui,sans-serif;fill:#444}}</style>
<h1>{escape(title)}</h1>
<p>Bars are one standard deviation. The dashed line is the latency target.</p>
{_svg(question, curves)}
<table><tr><th>plan</th><th>m</th><th>batch</th><th>TPOT ms</th><th>tok/s/device</th><th>$/Mtok</th>
<th>bound by</th></tr>
{rows}</table></html>
"""


def _table_row(plan: Plan) -> str:
    cells = (
        describe(plan),
        plan.micro_batches,
        plan.batch,
        f"{plan.tpot * 1e3:.1f}",
        f"{plan.tok_s_per_device:,.0f}",
        f"{plan.usd_per_mtok:.3f}",
        f"{plan.limited_by}, {plan.busiest} {plan.bound_by}",
    )
    return "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"


def _svg(question: Question, curves: Curves) -> str:
    plans = [plan for found in curves.values() for plan in found]
    right = max((1 / plan.tpot for plan in plans), default=1.0) * 1.05
    height = optimised(question.objective)
    top = max((height.of(plan) * (1 + plan.error) for plan in plans), default=1.0) * 1.05

    def x(value: float) -> float:
        return _MARGIN + value / right * (_WIDTH - 1.5 * _MARGIN)

    def y(value: float) -> float:
        return _HEIGHT - _MARGIN - value / top * (_HEIGHT - 1.5 * _MARGIN)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Pareto chart">']
    for step in range(6):
        across, up = right * step / 5, top * step / 5
        parts.append(
            f'<line x1="{x(0):.1f}" x2="{x(right):.1f}" y1="{y(up):.1f}" y2="{y(up):.1f}" stroke="#eee"/>'
        )
        parts.append(f'<text x="{x(0) - 8:.1f}" y="{y(up) + 4:.1f}" text-anchor="end">{up:,.3g}</text>')
        parts.append(
            f'<text x="{x(across):.1f}" y="{y(0) + 18:.1f}" text-anchor="middle">{across:,.0f}</text>'
        )
    if question.targets.tpot < float("inf") and 1 / question.targets.tpot < right:
        at = x(1 / question.targets.tpot)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y(0):.1f}" y2="{y(top):.1f}" stroke="#888" '
            'stroke-dasharray="4 4"/>'
        )
        parts.append(f'<text x="{at + 4:.1f}" y="{y(top) + 12:.1f}">target</text>')
    for place, (kind, found) in enumerate(curves.items()):
        parts += _series(height, found, _COLOURS[kind], x, y)
        parts.append(f'<circle cx="{_WIDTH - 220}" cy="{20 + 20 * place}" r="5" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{_WIDTH - 208}" y="{24 + 20 * place}">{_NAMES[kind]}</text>')
    parts.append(
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 12}" text-anchor="middle">tokens per second and request</text>'
    )
    parts.append(
        f'<text x="14" y="{_HEIGHT / 2}" transform="rotate(-90 14 {_HEIGHT / 2})" text-anchor="middle">'
        f"{height.label}</text></svg>"
    )
    return "\n".join(parts)


def _series(height: Measure, plans: Sequence[Plan], colour: str, x: object, y: object) -> list[str]:
    assert callable(x)
    assert callable(y)
    points = [(x(1 / plan.tpot), plan) for plan in plans]
    line = " ".join(f"{at:.1f},{y(height.of(plan)):.1f}" for at, plan in points)
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for at, plan in points:
        high, low = (y(height.of(plan) * (1 + sign * plan.error)) for sign in (1, -1))
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{high:.1f}" y2="{low:.1f}" stroke="{colour}"/>')
        parts.append(
            f'<circle cx="{at:.1f}" cy="{y(height.of(plan)):.1f}" r="4" fill="{colour}">'
            f"<title>{escape(describe(plan))}: {plan.tpot * 1e3:.1f} ms, "
            f"{plan.tok_s_per_device:,.0f} tok/s/device</title></circle>"
        )
    return parts
