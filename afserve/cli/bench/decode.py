"""`afserve bench decode`: steady-state decoding of afserve, colocated or not, with transformers beside it."""

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from afserve.child import module
from afserve.cli.bench.case import Case
from afserve.cli.bench.report import BenchRow, record, table
from afserve.cli.options import output_file
from afserve.errors import ConfigError, shown

ENGINES = ("afd", "colocated", "transformers")


def numbers(ctx: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    """A click callback: whole numbers above 0, comma-separated."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,9}", part.strip()) and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{shown(text)} is not a list of numbers such as 1,8,32", ctx, option)
    return tuple(int(part) for part in parts)


@click.command()
@click.option(
    "--model", default="nano", show_default=True, help="As for `afserve up`; transformers needs a folder."
)
@click.option(
    "--batch", default="1,8,32,64", show_default=True, callback=numbers, help="Sequences at a time."
)
@click.option(
    "--prompt-len", default=64, show_default=True, type=click.IntRange(1), help="Tokens of each prompt."
)
@click.option(
    "--output-len", default=64, show_default=True, type=click.IntRange(2), help="Tokens generated for each."
)
@click.option(
    "--repeats",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each batch; medians are shown.",
)
@click.option(
    "--engine", multiple=True, type=click.Choice(ENGINES), help="What to measure; all of them if not given."
)
@click.option("--colocated", is_flag=True, help="Of afserve only the colocated mode.")
@click.option("--attention", type=click.IntRange(1), help="Attention nodes.")
@click.option("--experts", type=click.IntRange(1), help="Expert nodes.")
@click.option("--micro-batches", default="auto", show_default=True, help="In flight per attention node.")
@click.option("--threads", type=click.IntRange(1), help="Compute threads per node, and of transformers.")
@click.option("--json", "as_json", is_flag=True, help="One JSON row per line.")
@click.option("--out", type=output_file, help="Append the JSON rows to this file.")
def decode(
    model: str,
    batch: tuple[int, ...],
    prompt_len: int,
    output_len: int,
    repeats: int,
    engine: tuple[str, ...],
    colocated: bool,
    attention: int | None,
    experts: int | None,
    micro_batches: str,
    threads: int | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Generated tokens per second in the steady state, time to first token and per token, start-up, memory."""
    from afserve.cli.bench.ours import Shape, measure

    case = Case(model, batch, prompt_len, output_len, repeats, threads)
    chosen = engine or tuple(name for name in ENGINES if not (colocated and name == "afd"))
    shapes = {"afd": Shape(False, attention, experts, micro_batches), "colocated": Shape(True, attention)}
    rows = []
    for name in chosen:
        for row in _peer(case) if name == "transformers" else measure(case, shapes[name]):
            rows.append(row)
            _emit(row, case, as_json, out)
    if not as_json:
        from rich.console import Console

        Console().print(table(rows))


def _emit(row: BenchRow, case: Case, as_json: bool, out: Path | None) -> None:
    line = json.dumps(record(row, case))
    if as_json:
        click.echo(line)
    else:
        click.echo(f"{row.engine}, batch {row.batch}: done", err=True)
    if out is not None:
        with open(out, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def _peer(case: Case) -> Iterator[BenchRow]:
    """transformers, where it is installed, on the folder that afserve would take."""
    from afserve.launch.plan.machine import this_machine
    from afserve.launch.plan.models import CONFIGS

    if importlib.util.find_spec("transformers") is None:
        click.echo(
            "transformers is not installed (pip install 'afserve[bench]'); measured without it", err=True
        )
        return
    folder = CONFIGS / case.model if (CONFIGS / case.model).is_dir() else Path(case.model)
    settings = {**asdict(case), "model": str(folder), "threads": case.threads or this_machine().cores}
    command = [*module("afserve.cli.bench.peer"), json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield BenchRow(**json.loads(line))
    if process.returncode:
        raise ConfigError(
            f"transformers failed on {folder} with exit code {process.returncode}; its output is above"
        )
