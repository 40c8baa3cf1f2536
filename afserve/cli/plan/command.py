"""`afserve plan`: its flags. What they ask is answered in `answer.py`, which `--help` does not import."""

from pathlib import Path
from typing import Any

import click

from afserve.cli.options import group_options
from afserve.cli.plan.flags import AnswerFlags, question_flags


def _compare(context: click.Context, option: click.Parameter, given: tuple[Path, Path] | None) -> None:
    """Answers at once: nothing is planned."""
    if given:
        from afserve.cli.plan.compare import compared

        click.echo(compared(*given))
        context.exit()


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
