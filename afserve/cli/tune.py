"""`afserve tune`: measures this machine's memory and kernels, and says what `afserve up` would choose here."""

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from afserve.cli.options import Within
from afserve.config import AUTO, ISAS
from afserve.errors import ConfigError

if TYPE_CHECKING:
    from afserve.launch.measure.choice import UpChoice
    from afserve.launch.measure.tuning import Tuning

ALL = "all"
_SHAPE = (2048, 768)  # of an expert of Qwen3-30B-A3B


@click.command()
@click.option(
    "--model",
    metavar="MODEL",
    help="As for `afserve up`: its experts' sizes are measured, and whether it fits. Else nano, and experts of "
    "2048 x 768.",
)
@click.option(
    "--isa",
    type=click.Choice((AUTO, ALL, *ISAS)),
    default=AUTO,
    show_default=True,
    help="Instruction set of the kernels; all measures each one that this machine has.",
)
@click.option("--seconds", type=Within(1, 600), default=20.0, show_default=True, help="To take, about.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def tune(model: str | None, isa: str, seconds: float, as_json: bool) -> None:
    """How fast this machine reads memory, how near the kernels come to that, and what `afserve up` would choose.

    A token of a sequence that is alone takes as long as its weights take to be read: the read rate is the limit, and
    the shares at few rows say how near to it this machine is. At many rows the product itself is the limit.
    """
    from afserve.kernels.isa import check_isa, isas_here
    from afserve.launch.plan.machine import this_machine
    from afserve.launch.plan.models import find_model
    from afserve.launch.plan.numa import seats_here

    begin, machine = time.perf_counter(), replace(this_machine(), numa=seats_here())
    if not (here := isas_here()):
        raise ConfigError(
            "afserve tune measures the native library, which is not built: see `afserve doctor`"
        )
    chosen = AUTO if isa == ALL else isa
    check_isa(chosen)
    with tempfile.TemporaryDirectory() as scratch:
        found = find_model(model or "nano", Path(scratch))
        from afserve.families.table import load_spec  # what follows imports torch
        from afserve.launch.measure.choice import choice_here
        from afserve.launch.measure.tuning import measure_machine

        choice = choice_here(found, machine, chosen)
        spec = load_spec(found.folder)
        shape = (spec.expert_width, spec.moe.inner) if model is not None else _SHAPE
    asked = here if isa == ALL else (choice.isa,)
    tuning = measure_machine(machine, asked, *shape, seconds)
    took = time.perf_counter() - begin
    if as_json:
        click.echo(json.dumps(_values(tuning, choice, here, took)))
        return
    for line in _report(tuning, choice, here):
        click.echo(line)
    for warning in tuning.warnings():
        click.secho(f"! {warning}; measure again when the machine is quiet", fg="red")
    click.echo(f"took {took:.0f} s")


def _values(tuning: "Tuning", choice: "UpChoice", here: tuple[str, ...], took: float) -> dict[str, object]:
    from afserve.launch.plan.processors import processor_name

    return {
        "machine": processor_name(), **asdict(tuning), "isas": here, "up": asdict(choice),
        "warnings": tuning.warnings(), "seconds": round(took, 1),
    }  # fmt: skip


def _report(tuning: "Tuning", choice: "UpChoice", here: tuple[str, ...]) -> Iterator[str]:
    from afserve.launch.plan.processors import processor_name

    yield f"{processor_name()}, {tuning.others.cores} cores; instruction sets {', '.join(here)}"
    yield ""
    rates = (
        f"{read.gb_s:.1f} GB/s by {read.threads} thread{'s' * (read.threads > 1)}" for read in tuning.reads
    )
    yield f"memory is read at {', '.join(rates)}"
    yield ""
    for isa in dict.fromkeys(figure.isa for figure in tuning.kernels):
        yield from _table(tuning, isa)
        yield ""
    yield from _chosen(choice)


def _table(tuning: "Tuning", isa: str) -> Iterator[str]:
    own = [figure for figure in tuning.kernels if figure.isa == isa]
    rows = list(dict.fromkeys(figure.rows for figure in own))
    of = f"experts of {tuning.hidden} x {tuning.inner}, {_threads(tuning.others.cores)}"
    yield f"{isa}: weights read as a share of that, {of}"
    yield f"  {'rows':6}{''.join(f'{count:>7}' for count in rows)}   at {rows[-1]} rows"
    for kept in dict.fromkeys(figure.kept for figure in own):
        line = [figure for figure in own if figure.kept == kept]
        shares = "".join(f"{figure.share:>7.0%}" for figure in line)
        yield f"  {kept:6}{shares}   {line[-1].gflop_s:,.0f} GFLOP/s"


def _chosen(choice: "UpChoice") -> Iterator[str]:
    from afserve.launch.plan.footprint import gib

    sizes = ", ".join(f"{gib(size)} with {dtype}" for dtype, size in choice.weights.items())
    if not choice.expert_dtype:
        yield f"afserve up {choice.model}: does not fit here; weights are {sizes} (--expert-dtype)"
        return
    flag = "" if choice.expert_dtype == AUTO else f" --expert-dtype {choice.expert_dtype}"
    nodes = f"{choice.attention} attention x {choice.experts} expert, {_threads(choice.threads)} each"
    lends = ", whoever waits lends its core" if choice.lends_cores else ""
    yield f"afserve up {choice.model}{flag}: {nodes}{lends}; {choice.isa}; weights {sizes}"
    yield f"  {choice.kv_tokens:,} KV tokens on each attention node"


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"
