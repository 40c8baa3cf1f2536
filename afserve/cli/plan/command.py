"""`afserve plan`: its flags. What they ask is answered in `answer.py`, which `--help` does not import."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from afserve.cli.options import Within, group_options, option, output_file
from afserve.cli.plan.flags import question_flags
from afserve.config import THREADS


def _compare(context: click.Context, option: click.Parameter, given: tuple[Path, Path] | None) -> None:
    """Answers at once: nothing is planned."""
    if given:
        from afserve.cli.plan.compare import compared

        click.echo(compared(*given))
        context.exit()


@dataclass(frozen=True, slots=True)
class AnswerFlags:
    """What is answered beside the plan, and where it is written."""

    top: int = option(
        default=3, type=Within(1, 50, whole=True), help="Plans to show beside the baseline.  [default: 3]"
    )
    as_json: bool = option("--json", is_flag=True, help="Print JSON: best, alternatives, verdict.")
    charts: tuple[Path, ...] = option(
        "--chart",
        multiple=True,
        type=output_file,
        metavar="FILE",
        help="Pareto chart: .png, .html. Repeatable.",
    )
    reports: tuple[Path, ...] = option(
        "--report",
        multiple=True,
        type=output_file,
        metavar="FILE",
        help="Write a report to decide from: .html (one page, no network), .json, .png. It has the question, the "
        "verdict and what would decide it, the Pareto front, the stages, a tornado, what is assumed with its source. "
        "Repeatable.",
    )
    cluster: Path | None = option(
        type=output_file,
        metavar="FILE",
        help="Write the best plan that `afserve up --cluster FILE` can start; with --goodput, the best layout.",
    )
    goodput: bool = option(
        is_flag=True,
        help="Also simulate which pays: shared experts, P/D with two copies, or chunked prefill. Takes minutes; needs "
        "--trace, --ttft, --tpot and one --pool.",
    )
    cores: int | None = option(
        type=Within(THREADS.low, THREADS.high, whole=True),
        help="AFD: all nodes are processes of one machine with so many cores, played event by event. Needs a "
        "calibration as --engine, --attention-devices, --expert-devices, --concurrency and a decode-only workload.",
    )


@click.command("plan", short_help="Plan capacity: what to buy, how to split it, what it costs.")
@question_flags
@group_options(AnswerFlags)
@click.option(
    "--compare",
    nargs=2,
    type=Path,
    metavar="A.json B.json",
    is_eager=True,
    expose_value=False,
    callback=_compare,
    help="Put two answers of --json side by side, and plan nothing.",
)
def plan(asked: AnswerFlags, **flags: Any) -> None:
    """Plan capacity: which hardware for attention and for experts, how many, what throughput, latency and cost,
    and whether to disaggregate at all.

    \b
    afserve plan --model deepseek-v3 --pool h800=64 --pool h20=64 --tpot 50ms --context 4096
    """
    from afserve.cli.plan.answer import answer

    answer(asked, flags)
