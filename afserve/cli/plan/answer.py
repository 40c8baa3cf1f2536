"""What `afserve plan` does: read the question, ask the planner, print a table (or JSON), a verdict, charts, reports, a
cluster file. What few plans need is imported where it is needed: imports are half of a plan's time."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from afserve.cli.plan.drafting import draft_lines, draft_values
from afserve.cli.plan.flags import AnswerFlags
from afserve.cli.plan.heard import heard_lines
from afserve.cli.plan.layout import on_one_machine
from afserve.cli.plan.options import asked_question
from afserve.cli.plan.printed import as_table
from afserve.cli.plan.values import as_values
from afserve.errors import ConfigError, DoesNotFitError, shown
from afserve.placement.planner.cluster_file import cluster_toml, obstacle, on_cpu, phases_toml
from afserve.placement.planner.draft_worth import DraftWorth, draft_worth
from afserve.placement.planner.infeasible import describe, explain
from afserve.placement.planner.panel import Panel, asked_of_all, differences
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question, RankedPlans, pareto
from afserve.placement.planner.scale import on_more_devices
from afserve.placement.planner.sensitivity import sensitivity, verdict

if TYPE_CHECKING:
    from afserve.cli.plan.goodput import PlannedGoodput


def answer(asked: AnswerFlags, flags: dict[str, Any]) -> None:
    """Prints what is asked, and writes its files. Raises ConfigError, NotFoundError or DoesNotFitError."""
    _check_endings("chart", asked.charts, (".png", ".html"))
    _check_endings("report", asked.reports, (".html", ".json", ".png"))
    model, typed = flags["model"], dict(flags)  # groups are taken out of the flags
    asked_for = asked_question(flags)
    question = on_one_machine(asked_for.started() if asked.cluster else asked_for, asked.cores)
    if asked.goodput:
        from afserve.cli.plan.goodput import check_goodput

        check_goodput(question, typed)
    question, found, panel = asked_of_all(question)
    best = found.best()
    if best is None:
        raise DoesNotFitError(explain(question))
    words = verdict(question, found, panel.chance, differences(question, panel, best))
    changes = sensitivity(question, best)
    words = " ".join(filter(None, (words, on_more_devices(question, found))))
    worth = draft_worth(question, best)
    if asked.reports:
        _write_reports(asked.reports, question, found, panel, words, changes, worth)
    layouts: tuple[PlannedGoodput, ...] = ()
    more_values, more_lines = dict[str, object](), ""
    if asked.goodput:
        from afserve.cli.plan.goodput import goodput_with, played_lines, played_values

        played = goodput_with(question, best.drafts)
        layouts, more_values, more_lines = played.found, played_values(played), played_lines(played)
    if asked.as_json:
        values = as_values(question, found, panel, words, changes) | draft_values(worth)
        click.echo(json.dumps(values | more_values, indent=2))
    else:
        said = [*heard_lines(question, panel), *draft_lines(worth)]
        click.echo(as_table(question, found, words, changes, asked.top, said) + more_lines)
    if asked.cluster is not None and not (layouts and _write_phases(asked.cluster, question, layouts, model)):
        _write_cluster(asked.cluster, question, found.plans, model)
    if asked.charts:
        _draw(asked.charts, question)


def _check_endings(option: str, paths: tuple[Path, ...], endings: tuple[str, ...]) -> None:
    """Before anything is planned: what is written."""
    for path in paths:
        if path.suffix not in endings:
            wanted = " or ".join(endings)
            raise ConfigError(f"--{option} {shown(str(path))}: the name must end in {wanted}")


def _write_reports(
    paths: tuple[Path, ...],
    question: Question,
    found: RankedPlans,
    panel: Panel,
    verdict: str,
    changes: dict[str, float | None],
    worth: DraftWorth | None,
) -> None:
    """All from one evaluation: pages and JSON say the same."""
    from afserve.cli.plan.report import report_of, typed_flags, values
    from afserve.cli.plan.report_page import report_html
    from afserve.cli.plan.report_png import write_png

    typed = typed_flags(click.get_current_context())
    report = report_of(question, found, panel, verdict, changes, typed, worth)
    for path in paths:
        if path.suffix == ".html":
            _write(path, "report", report_html(report))
        elif path.suffix == ".png":
            write_png(path, report)
        else:
            _write(path, "report", json.dumps(values(report), indent=2, allow_nan=False) + "\n")
        click.echo(f"wrote {path}", err=True)


def _write_phases(path: Path, question: Question, played: "Sequence[PlannedGoodput]", model: str) -> bool:
    """The best played layout that `afserve up` can start, where there is one. Says when another one is better."""
    from afserve.cli.plan.goodput import phases_of

    found = next(((one, phases) for one in played if (phases := phases_of(one, question))), None)
    if found is None:
        click.echo(
            f"note: {path} is the plan above: `afserve up` starts no played layout from a file", err=True
        )
        return False
    one, phases = found
    chip, name = question.pools[0].chip, question.setting.shape.name
    _write(path, "cluster", phases_toml(phases, chip, name, path=_checkpoint(model), rate=one.rate))
    if one is not played[0]:
        click.echo(
            f"note: {path} is {one.kind}, {one.rate / played[0].rate - 1:+.0%} requests/s: `afserve up` starts no "
            f"{played[0].kind} from a file",
            err=True,
        )
    return True


def _checkpoint(model: str) -> str:
    """The folder of a model that was given by one; empty for a name."""
    given = Path(model)
    folder = given.parent if given.suffix == ".json" and given.is_file() else given
    return str(folder.resolve()) if (folder / "config.json").is_file() else ""


def _write_cluster(path: Path, question: Question, plans: Sequence[Plan], model: str) -> None:
    """The best plan that `afserve up` can start; where there is none, the best one. Says when that is not the same."""
    best = plans[0]
    chosen = next((plan for plan in plans if not obstacle(plan)), best)
    here = _on_one_machine(chosen, question)
    copies = question.setting.routing.copies
    text = cluster_toml(
        chosen,
        question.setting.shape.name,
        {pool.chip.name: pool.chip for pool in question.pools},
        path=_checkpoint(model),
        here=here,
        copies=copies,
        ttft=question.setting.ttft,
        precision=question.setting.precision,
    )
    _write(path, "cluster", text)
    if obstacle(chosen):
        click.echo(f"note: `afserve up` cannot start {path}: {obstacle(chosen)}", err=True)
    elif chosen is not best:
        slower, dearer = chosen.tpot / best.tpot - 1, chosen.usd_per_mtok / best.usd_per_mtok - 1
        click.echo(
            f"note: {path} is {describe(chosen)}, at {slower:+.0%} TPOT and {dearer:+.0%} $/Mtok: "
            f"`afserve up` cannot start the best plan, {obstacle(best)}",
            err=True,
        )


def _on_one_machine(plan: Plan, question: Question) -> bool:
    """Whether one host has all the devices. CPU hosts' nodes are processes: any machine can try those."""
    chips = {pool.chip.name: pool.chip for pool in question.pools}
    kinds = set(plan.devices_used)
    if all(on_cpu(kind) for kind in kinds):
        return True
    return len(kinds) == 1 and plan.devices <= chips[plan.attention.hardware].devices


def _draw(charts: tuple[Path, ...], question: Question) -> None:
    from afserve.cli.plan.report_page import chart_html
    from afserve.cli.plan.report_png import pareto_png

    curves: dict[str, list[Plan]] = {}
    for share, found in pareto(question):
        curves = found
        if sys.stderr.isatty():
            print(f"chart: {share:4.0%}", end="\r", file=sys.stderr, flush=True)
    for chart in charts:
        if chart.suffix == ".html":
            _write(chart, "chart", chart_html(question, curves))
        else:
            pareto_png(chart, question, curves)
        click.echo(f"wrote {chart}", err=True)


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--{option} {path}: {error.strerror}") from error
