"""A plan's report as one HTML page that needs nothing else: no network, no script. It prints, and has a dark side.

Whatever came from outside (names of models, hardware and files, notes of profiles) is escaped.
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from afserve.cli.plan.report import PlanReport
from afserve.cli.plan.report_figures import KINDS, amount, pareto_figure, rate, stage_figure, tornado_figure
from afserve.placement.planner.infeasible import describe
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.tornado import Swing

_STYLE = Path(__file__).with_name("report.css")


def page(report: PlanReport) -> str:
    setting = report.question.setting
    title = f"{setting.shape.name}, {setting.workload.name}"
    sections = (
        _asked(report),
        _verdict(report),
        _plan(report.best),
        _front(report),
        _stages(report.best, stage_figure(report)),
        _tornado(report),
        _assumed(report),
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(sections) + "\n</body>\n</html>\n"
    )


def _asked(report: PlanReport) -> str:
    return f"<h2>What was asked</h2>\n<pre>{escape(report.asked)}</pre>"


def _verdict(report: PlanReport) -> str:
    """The verdict names its probability, and what would decide it where anything would."""
    said = f'<h2>Verdict</h2>\n<p class="verdict">{escape(report.verdict)}</p>'
    named = report.decider.lower() in report.verdict.lower()
    return said if named else f"{said}\n<p>{escape(report.decider)}</p>"


def _plan(plan: Plan) -> str:
    low, high = plan.interval
    rows = (
        ("time per token", f"{plan.tpot * 1e3:.1f} ms, 80 % inside {low * 1e3:.1f} to {high * 1e3:.1f} ms"),
        ("throughput", f"{rate(plan.tok_s)} tok/s, {rate(plan.tok_s_per_device)} per device"),
        (
            "requests in decode",
            f"{plan.requests:,}: {plan.micro_batches} micro-batches of {plan.batch} on {plan.ranks} ranks",
        ),
        ("cost", f"${plan.usd_per_mtok:.3f} per million tokens, ${plan.usd_per_hour:,.2f} per hour"),
        ("power", f"{plan.watts / 1e3:,.1f} kW"),
        ("batch limited by", plan.limited_by),
        ("busiest part", f"{plan.busiest}, waits for {plan.bound_by}"),
        ("engine", plan.engine),
    )
    heading = f"<h2>Chosen plan: {escape(describe(plan))}</h2>"
    return f"{heading}\n{_table(('figure', 'value'), rows)}"


def _front(report: PlanReport) -> str:
    rows = [
        (KINDS[kind], describe(plan), *_figures(plan))
        for kind, plans in report.front.items()
        for plan in plans
    ]
    heads = ("kind", "plan", "m", "batch", "TPOT ms", "tok/s per user", "tok/s per device", "$/Mtok")
    said = "Each point is the best layout at that speed, by what the plan was chosen by; the ring is the chosen plan."
    first, *others = report.heights
    drawn = [_figure(pareto_figure(report, first), said)]
    drawn += [_figure(pareto_figure(report, one), "The same plans by another measure.") for one in others]
    figures = "\n".join(drawn)
    return f"<h2>Pareto front</h2>\n{figures}\n{_table(heads, rows, numbers_from=2)}"


def _figures(plan: Plan) -> tuple[str, ...]:
    return (
        str(plan.micro_batches),
        str(plan.batch),
        f"{plan.tpot * 1e3:.1f}",
        rate(1 / plan.tpot),
        rate(plan.tok_s_per_device),
        f"{plan.usd_per_mtok:.3f}",
    )


def _stages(plan: Plan, figure: str) -> str:
    outside = f"{plan.stages.outside * 1e6:,.0f} us of each step lie outside of its {plan.layers} MoE layers."
    said = f"One layer of one micro-batch; {plan.micro_batches} of them take turns. {outside}"
    return f"<h2>Where the time goes</h2>\n{_figure(figure, said)}"


def _tornado(report: PlanReport) -> str:
    heads = (
        "assumption",
        "unit",
        "low",
        "planned",
        "high",
        "tok/s per device at low",
        "at high",
        "why these ends",
    )
    rows = [_swing(swing) for swing in report.swings]
    said = (
        "Tokens per second and device of the same layout when one assumption is at its low or its high value. The "
        "batch is chosen anew inside the targets."
    )
    table = _table(heads, rows, numbers_from=2, numbers_to=7)
    return f"<h2>What it hangs on</h2>\n{_figure(tornado_figure(report), said)}\n{table}"


def _swing(swing: Swing) -> tuple[str, ...]:
    ends = ("misses the target" if found is None else rate(found) for found in (swing.at_low, swing.at_high))
    values = (amount(swing, value) for value in (swing.low, swing.planned, swing.high))
    return (swing.name, swing.unit, *values, *ends, swing.why)


def _assumed(report: PlanReport) -> str:
    rows = [(row.what, row.value, row.source) for row in report.assumed]
    return f"<h2>What is assumed</h2>\n{_table(('what', 'value', 'source'), rows)}"


def _figure(drawn: str, said: str) -> str:
    return f"<figure>\n{drawn}\n<figcaption>{escape(said)}</figcaption>\n</figure>"


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int = 99, numbers_to: int = 99
) -> str:
    """Columns from `numbers_from` up to, and without, `numbers_to` are numbers, which stand on the right."""

    def row(cells: Sequence[str], tag: str) -> str:
        numbers = (
            ' class="number"' if numbers_from <= place < numbers_to else "" for place in range(len(cells))
        )
        inside = "".join(
            f"<{tag}{css}>{escape(cell)}</{tag}>" for css, cell in zip(numbers, cells, strict=True)
        )
        return f"<tr>{inside}</tr>"

    body = "\n".join(row(cells, "td") for cells in rows)
    return f'<div class="wide"><table>\n<thead>{row(heads, "th")}</thead>\n<tbody>\n{body}\n</tbody></table></div>'
