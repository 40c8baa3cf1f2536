"""The three figures of a plan's report: the Pareto front, the stages of one layer, the tornado. SVG text, no script."""

import math
from collections.abc import Callable, Iterable, Iterator

from afserve.cli.plan import svg
from afserve.cli.plan.measure import Measure
from afserve.cli.plan.report import PlanReport
from afserve.placement.planner.infeasible import describe
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.tornado import TIMES, Swing

WIDTH, LEFT, RIGHT = 760.0, 70.0, 30.0
KINDS = {"colocated": "colocated", "afd": "AFD"}
SAID = {
    "compute": "computing",
    "moved": "moving rows",
    "low": "at the low value",
    "high": "at the high value",
}
"""What the colours of bars mean."""
_SEEN = 1e-3  # of the planned rate: a shorter bar is no bar


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def amount(swing: Swing, value: float) -> str:
    return f"x {value:.2f}" if swing.unit == TIMES else f"{value:,.4g}"


def split_of(plan: Plan) -> str:
    """A plan's kind and the hardware of its sides, the same for all counts of devices."""
    sides = (plan.prefill, plan.attention, plan.experts if plan.kind == "afd" else None)
    return f"{KINDS[plan.kind]} on {' + '.join(side.hardware for side in sides if side is not None)}"


def splits(report: PlanReport) -> list[str]:
    """In the order of the front."""
    return list(dict.fromkeys(split_of(plan) for plans in report.front.values() for plan in plans))


def pareto_figure(report: PlanReport, measured: Measure) -> str:
    """A throughput against the tokens per second that one user sees."""
    height, top, bottom = 420.0, 40.0, 50.0
    plans = [report.best, *(plan for found in report.front.values() for plan in found)]
    most_x = 1.06 * max(1 / plan.tpot for plan in plans)
    most_y = 1.06 * max(measured.of(plan) for plan in plans)

    def at(across: float, up: float) -> tuple[float, float]:
        return (
            LEFT + across / most_x * (WIDTH - LEFT - RIGHT),
            height - bottom - up / most_y * (height - top - bottom),
        )

    parts = list(_axes(at, most_x, most_y))
    if report.wanted is not None and report.wanted < most_x:
        x, low = at(report.wanted, 0)
        parts += [
            svg.line(x, low, x, top, "target"),
            svg.text(x + 4, top + 10, f"target: {rate(report.wanted)}", "soft"),
        ]
    for number, (kind, found) in enumerate(report.front.items()):
        points = [at(1 / plan.tpot, measured.of(plan)) for plan in found]
        parts.append(svg.polyline(points, kind))
        parts += [
            svg.dot(*point, f"dot-{kind}", _said(plan), square=kind == "afd")
            for point, plan in zip(points, found, strict=True)
        ]
        x = WIDTH - 220 + 110 * number
        parts += [svg.dot(x, 16, f"dot-{kind}", KINDS[kind], square=kind == "afd")]
        parts += [svg.text(x + 10, 20, KINDS[kind])]
    parts += _chosen(report.best, *at(1 / report.best.tpot, measured.of(report.best)))
    parts.append(svg.text(WIDTH / 2, height - 10, "tokens per second and user", "soft middle"))
    parts.append(svg.upright(14, height / 2, measured.label))
    return svg.drawing(WIDTH, height, f"Pareto front: {measured.label} against speed per user", parts)


def _axes(at: Callable[[float, float], tuple[float, float]], most_x: float, most_y: float) -> Iterator[str]:
    for up in _ticks(most_y):
        (left, y), (right, _) = at(0, up), at(most_x, up)
        yield svg.line(left, y, right, y, "grid")
        yield svg.text(left - 8, y + 4, rate(up), "soft end")
    for across in _ticks(most_x):
        x, low = at(across, 0)
        yield svg.text(x, low + 18, rate(across), "soft middle")


def _ticks(most: float) -> Iterator[float]:
    """Four to ten round numbers from 0 to `most`."""
    power = 10.0 ** math.floor(math.log10(most))
    step = next(part * power for part in (0.1, 0.2, 0.5, 1.0, 2.0) if most / (part * power) <= 10)
    yield from (step * number for number in range(int(most / step) + 1))


def _chosen(plan: Plan, x: float, y: float) -> list[str]:
    """A ring around it, and its name on the side that has room."""
    side, css = (16, "") if x < WIDTH / 2 else (-16, "end")
    mark = svg.dot(x, y, f"dot-{plan.kind}", _said(plan), square=plan.kind == "afd")
    return [mark, svg.ring(x, y, "chosen"), svg.text(x + side, y - 8, "chosen plan", css)]


def _said(plan: Plan) -> str:
    return (
        f"{describe(plan)}: {plan.tpot * 1e3:.1f} ms per token, {rate(plan.tok_s_per_device)} tok/s per device, "
        f"${plan.usd_per_mtok:.3f}/Mtok"
    )


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


def stage_figure(report: PlanReport) -> str:
    """Microseconds of one layer of one micro-batch. Transfers are drawn in another colour than computing."""
    rows = stages(report.best)
    left, room = 110.0, WIDTH - 110.0 - 110.0
    most = max([seconds for _, seconds, _ in rows] + [1e-12])
    parts = list(_legend((("compute", SAID["compute"]), ("moved", SAID["moved"]))))
    for number, (name, seconds, css) in enumerate(rows):
        y, end = 32.0 + 34 * number, left + seconds / most * room
        words = f"{seconds * 1e6:,.1f} us"
        parts.append(svg.text(left - 10, y + 16, name, "end"))
        parts.append(svg.bar(left, end, y, 24, css, f"{name}: {words}"))
        parts.append(svg.text(end + 8, y + 16, words))
    parts.append(svg.line(left, 24, left, 32.0 + 34 * len(rows), "planned"))
    return svg.drawing(WIDTH, 36.0 + 34 * len(rows), "Stages of one layer", parts)


def _legend(colours: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Of (css class, words), above a figure's bars."""
    for number, (css, words) in enumerate(colours):
        x = 290.0 + 150 * number
        yield svg.bar(x, x + 12, 8, 12, css, words)
        yield svg.text(x + 18, 18, words)


def tornado_figure(report: PlanReport) -> str:
    """A pair of bars for each assumption, from the plan's own rate to that at its low and at its high value."""
    planned = report.best.tok_s_per_device
    ends = [end or 0.0 for swing in report.swings for end in (swing.at_low, swing.at_high)]
    least, most = min([planned, *ends]), max([planned, *ends])
    left, room, top = 290.0, WIDTH - 290.0 - 90.0, 54.0
    span = max(most - least, 1e-9 * max(most, 1.0))

    def at(value: float) -> float:
        return left + (value - least) / span * room

    parts = [svg.text(at(planned), 44, f"as planned: {rate(planned)}", "middle")]
    parts += _legend((("low", SAID["low"]), ("high", SAID["high"])))
    swings = shown_swings(report)
    for number, swing in enumerate(swings):
        parts += _pair(swing, planned, top + 46 * number, at)
    height = top + 46 * len(swings)
    parts.append(svg.line(at(planned), top - 6, at(planned), height, "planned"))
    return svg.drawing(WIDTH, height + 6, "Tornado: what the throughput of the plan hangs on", parts)


def _pair(swing: Swing, planned: float, y: float, at: Callable[[float], float]) -> Iterator[str]:
    yield svg.text(196, y + 22, swing.name, "end")
    for place, (css, value, found) in enumerate(
        (("low", swing.low, swing.at_low), ("high", swing.high, swing.at_high))
    ):
        words = "misses the target" if found is None else rate(found)
        x, below = at(found or 0.0), y + 18 * place
        yield svg.text(280, below + 13, amount(swing, value), "soft end")
        yield svg.bar(at(planned), x, below, 16, css, f"{swing.name}, {amount(swing, value)}: {words}")
        yield svg.text(max(x, at(planned)) + 6, below + 13, words)
