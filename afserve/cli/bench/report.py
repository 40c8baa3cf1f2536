"""Rows of a decode measurement: as JSON lines with machine, commit and date, or as a table."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import afserve
from afserve.cli.bench.case import Case
from afserve.cli.bench.figures import BatchFigures, spread
from afserve.launch.plan.machine import this_machine
from afserve.launch.plan.processors import processor_name


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One engine at one batch size: medians over the repeats, rates with the smallest and largest. Seconds, MiB. `isa`:
    the instruction set of afserve's kernels."""

    engine: str
    batch: int
    tokens_per_second: float | None
    low: float | None
    high: float | None
    ttft: float | None
    tpot: float | None
    start_to_ready: float
    peak_mib: Mapping[str, float | None]
    nodes: str = ""
    micro_batches: str = ""
    threads: int | None = None
    isa: str = ""

    @classmethod
    def of_runs(cls, batch: int, runs: Sequence[BatchFigures], **others: Any) -> "BenchRow":
        rate, low, high = spread([run.tokens_per_second for run in runs])
        ttft, tpot = (spread(times)[0] for times in ([run.ttft for run in runs], [run.tpot for run in runs]))
        return cls(batch=batch, tokens_per_second=rate, low=low, high=high, ttft=ttft, tpot=tpot, **others)


def record(row: BenchRow, case: Case) -> dict[str, object]:
    """The row as it goes into a results file."""
    values = {k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(row).items()}
    return {
        "bench": "decode",
        "model": Path(case.model).name,
        "prompt_len": case.prompt_len,
        "output_len": case.output_len,
        "repeats": case.repeats,
        **values,
        **measured_here(this_machine().cores),
    }


def measured_here(cores: int | None) -> dict[str, object]:
    """Where and when a row was measured, and what else ran: as every row carries it."""
    return {
        "machine": f"{processor_name()}, {cores} cores",
        "load": round(os.getloadavg()[0], 1),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
    }


def commit() -> str:
    """Of the checkout that runs, "-dirty" if it was changed; the version where there is no checkout."""
    folder = Path(afserve.__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],  # noqa: S607  whichever git the user has
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return afserve.__version__
    return found.stdout.strip()


def table(rows: Sequence[BenchRow]) -> object:
    """Memory is the sum over processes of the most that each ever had."""
    from rich.table import Table

    drawn = Table(box=None)
    for column in ("engine", "nodes", "m", "batch", "tok/s", "+-", "TTFT ms", "TPOT ms", "ready s", "MiB"):
        drawn.add_column(column, justify="left" if column == "engine" else "right")
    for row in rows:
        half = None if row.high is None or row.low is None else (row.high - row.low) / 2
        drawn.add_row(
            row.engine,
            row.nodes,
            row.micro_batches,
            str(row.batch),
            _number(row.tokens_per_second),
            _number(half),
            _number(row.ttft, 1000),
            _number(row.tpot, 1000),
            f"{row.start_to_ready:.1f}",
            _number(sum(value or 0.0 for value in row.peak_mib.values())),
        )
    return drawn


def _number(value: float | None, scale: float = 1) -> str:
    if value is None:
        return "-"
    scaled = value * scale
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.1f}"
