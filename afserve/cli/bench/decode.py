"""`afserve bench decode`: steady-state decoding of afserve, colocated or not, with transformers beside it."""

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from afserve.child import module
from afserve.cli.bench.case import Case
from afserve.cli.bench.report import BenchRow, record, table
from afserve.cli.options import group_options, option, output_file
from afserve.cli.settings import setting_option
from afserve.config import EngineSettings
from afserve.errors import ConfigError, shown
from afserve.kernels.isa import check_isa

ENGINES = ("afd", "colocated", "transformers")


def numbers(ctx: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    """A click callback: whole numbers above 0, comma-separated."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,9}", part.strip()) and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{shown(text)} is not a list of numbers such as 1,8,32", ctx, option)
    return tuple(int(part) for part in parts)


@dataclass(frozen=True, slots=True)
class DecodeFlags:
    """What is measured, on which shapes, and where rows go."""

    model: str = option(
        default="nano", show_default=True, help="As for `afserve up`; transformers needs a folder."
    )
    batch: tuple[int, ...] = option(
        default="1,8,32,64", show_default=True, callback=numbers, help="Sequences at a time."
    )
    prompt_len: int = option(
        default=64, show_default=True, type=click.IntRange(1), help="Tokens of each prompt."
    )
    output_len: int = option(
        default=64, show_default=True, type=click.IntRange(2), help="Tokens generated for each."
    )
    repeats: int = option(
        default=3, show_default=True, type=click.IntRange(1), help="Runs of each batch; medians are shown."
    )
    engine: tuple[str, ...] = option(
        multiple=True, type=click.Choice(ENGINES), help="What to measure; all of them if not given."
    )
    colocated: bool = option(is_flag=True, help="Of afserve only the colocated mode.")
    attention: int | None = option(type=click.IntRange(1), help="Attention nodes.")
    experts: int | None = option(type=click.IntRange(1), help="Expert nodes.")
    micro_batches: str = option(default="auto", show_default=True, help="In flight per attention node.")
    threads: int | None = option(
        type=click.IntRange(1), help="Compute threads per node, and of transformers."
    )
    as_json: bool = option("--json", is_flag=True, help="One JSON row per line.")
    out: Path | None = option(type=output_file, help="Append the JSON rows to this file.")


@click.command()
@setting_option(EngineSettings, "isa")
@group_options(DecodeFlags)
def decode(flags: DecodeFlags, isa: str) -> None:
    """Generated tokens per second in the steady state, time to first token and per token, start-up, memory."""
    from afserve.cli.bench.ours import Shape, measure

    check_isa(isa)
    sizes = flags.prompt_len, flags.output_len, flags.repeats
    case = Case(flags.model, flags.batch, *sizes, flags.threads, isa)
    chosen = flags.engine or tuple(name for name in ENGINES if not (flags.colocated and name == "afd"))
    shapes = {
        "afd": Shape(False, flags.attention, flags.experts, flags.micro_batches),
        "colocated": Shape(True, flags.attention),
    }
    rows = []
    for name in chosen:
        for row in _peer(case) if name == "transformers" else measure(case, shapes[name]):
            rows.append(row)
            _emit(row, case, flags.as_json, flags.out)
    if not flags.as_json:
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
