"""`afserve bench pipeline`: stage times, bubbles, hidden transfers and hold times of a running ping-pong pipeline."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from afserve.cli.bench.decode import numbers
from afserve.cli.bench.report import measured_here
from afserve.cli.options import group_options, option, output_file
from afserve.cli.settings import setting_option
from afserve.config import EngineSettings
from afserve.errors import ConfigError
from afserve.kernels.isa import check_isa, used_isa
from afserve.launch.plan.machine import this_machine

if TYPE_CHECKING:
    from afserve.cli.bench.pipeline_node import Setup

Row = dict[str, object]
_COLUMNS = {  # key of a row: heading
    "batch": "batch",
    "mode": "mode",
    "micro_batches": "m",
    "tok_s": "tok/s",
    "attention_us": "A us",
    "expert_us": "F us",
    "under_way_us": "away us",
    "attention_bubble": "A idle",
    "expert_bubble": "F idle",
    "hidden": "hidden",
    "messages_per_call": "merged",
    "hold_us_per_call": "hold us",
}
_SHARES = ("attention_bubble", "expert_bubble", "hidden")


@dataclass(frozen=True, slots=True)
class PipelineFlags:
    """The pipelines that are run, and where rows go."""

    model: str = option(default="nano", show_default=True, help="As for `afserve up`.")
    attention: int = option(default=1, show_default=True, type=click.IntRange(1, 16), help="Attention nodes.")
    experts: int = option(default=1, show_default=True, type=click.IntRange(1, 16), help="Expert nodes.")
    micro_batches: tuple[int, ...] = option(
        default="1,2,3", show_default=True, callback=numbers, help="In flight, one row for each."
    )
    batch: tuple[int, ...] = option(
        default="8,32", show_default=True, callback=numbers, help="Sequences of each attention node."
    )
    prompt_len: int = option(
        default=64, show_default=True, type=click.IntRange(1), help="Tokens of each prompt."
    )
    output_len: int = option(
        default=64, show_default=True, type=click.IntRange(32), help="Tokens generated for each."
    )
    threads: int = option(
        default=1, show_default=True, type=click.IntRange(1), help="Compute threads per node."
    )
    share_cores: bool = option(
        "--share-cores/--no-share-cores",
        default=False,
        show_default=True,
        help="With one node of one thread on each side: the one that waits lends its core.",
    )
    as_json: bool = option("--json", is_flag=True, help="One JSON row per line.")
    out: Path | None = option(type=output_file, help="Append the JSON rows to this file.")


@click.command()
@setting_option(EngineSettings, "isa")
@group_options(PipelineFlags)
def pipeline(flags: PipelineFlags, isa: str) -> None:
    """Where the time of steady decoding goes: stages, bubbles, transfers that are hidden, holds."""
    check_isa(isa)
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for setup in setups(
            flags.model,
            Path(scratch),
            flags.attention,
            flags.experts,
            flags.batch,
            flags.prompt_len,
            flags.output_len,
            flags.threads,
            flags.share_cores,
        ):
            for row in rows(replace(setup, isa=isa), flags.micro_batches):
                found.append(row)
                line = json.dumps(row | origin(setup) | {"isa": used_isa(isa)})
                if flags.as_json:
                    click.echo(line)
                if flags.out is not None:
                    with flags.out.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")
    if not flags.as_json:
        from rich.console import Console

        Console().print(table(found))
        click.echo(
            "us per layer; shares of the counted time; colocated: as many threads as all nodes together"
        )


def setups(
    model: str,
    scratch: Path,
    attention: int,
    experts: int,
    batches: Sequence[int],
    prompt_len: int,
    output_len: int,
    threads: int,
    share_cores: bool = False,
) -> Iterator["Setup"]:
    """One for each batch."""
    from afserve.cli.bench.pipeline_node import Setup
    from afserve.config import ModelSource
    from afserve.launch.plan.models import find_model

    found = find_model(model, scratch)
    if not found.weights:
        raise ConfigError(f"--model {model}: there are no weights here; pass a checkpoint folder")
    source = ModelSource(str(found.folder), found.name)
    for batch in batches:
        yield Setup(source, "", 0, attention, experts, 1, batch, prompt_len, output_len, threads, share_cores)


def rows(setup: "Setup", micro_batches: Sequence[int]) -> Iterator[Row]:
    """The colocated baseline, then one row for each number of micro-batches."""
    from afserve.cli.bench.pipeline_run import disaggregated, together

    yield {"batch": setup.batch, **together(setup)}
    for count in micro_batches:
        yield {"batch": setup.batch, **disaggregated(replace(setup, micro_batches=count))}


def origin(setup: "Setup") -> Row:
    """What every row carries."""
    return {
        "bench": "pipeline",
        "model": setup.source.name,
        "nodes": f"{setup.attention}x{setup.experts}",
        "threads": setup.threads,
        **measured_here(this_machine().cores),
    }


def table(found: Sequence[Row]) -> object:
    from rich.table import Table

    drawn = Table(box=None)
    for key, heading in _COLUMNS.items():
        drawn.add_column(heading, justify="left" if key == "mode" else "right")
    for row in found:
        drawn.add_row(*(_cell(key, row.get(key)) for key in _COLUMNS))
    return drawn


def _cell(key: str, value: object) -> str:
    if value is None:
        return "-"
    if key in _SHARES:
        return f"{100 * float(str(value)):.0f} %"
    return f"{value:,.0f}" if isinstance(value, float) and value >= 100 else str(value)
