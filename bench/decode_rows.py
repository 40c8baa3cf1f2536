"""Rows of `bench.decode`: one engine at one batch size, as values, as they are kept, and as cells of a table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from afserve.cli.bench.case import Case
from afserve.cli.bench.figures import BatchFigures
from bench.origin import origin

HEAD = ["engine", "nodes", "m", "batch", "tok/s", "+-", "TTFT ms", "TPOT ms", "ready s", "MiB"]


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One engine at one batch size: medians over the repeats, rates with the smallest and largest. Seconds, MiB."""

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

    @classmethod
    def of_runs(cls, batch: int, runs: Sequence[BatchFigures], **others: Any) -> "BenchRow":
        rate, low, high = spread([run.tokens_per_second for run in runs])
        ttft, tpot = (spread(times)[0] for times in ([run.ttft for run in runs], [run.tpot for run in runs]))
        return cls(batch=batch, tokens_per_second=rate, low=low, high=high, ttft=ttft, tpot=tpot, **others)


def spread(values: Sequence[float | None]) -> tuple[float | None, float | None, float | None]:
    """(median, smallest, largest) of what there is."""
    known = sorted(value for value in values if value is not None)
    return (median(known), known[0], known[-1]) if known else (None, None, None)


def peak_mib(pid: int | str = "self") -> float | None:
    """The most resident memory a process ever had."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), "")
    return round(int(line.split()[1]) / 1024, 1) if line else None


def record(row: BenchRow, case: Case) -> dict[str, object]:
    """The row as it goes into the results."""
    values = {k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(row).items()}
    sizes = {"prompt_len": case.prompt_len, "output_len": case.output_len, "repeats": case.repeats}
    return {"bench": "decode", "model": Path(case.model).name, **sizes, **values, **origin(case.isa)}


def line(row: BenchRow) -> list[str]:
    """Cells below HEAD. Memory is the sum over processes of the most that each ever had."""
    half = None if row.high is None or row.low is None else (row.high - row.low) / 2
    times = (None if value is None else value * 1e3 for value in (row.ttft, row.tpot))
    memory = sum(value or 0.0 for value in row.peak_mib.values())
    figures = (row.tokens_per_second, half, *times, row.start_to_ready, memory)
    shown = ("-" if one is None else f"{one:,.0f}" if one >= 100 else f"{one:.1f}" for one in figures)
    return [row.engine, row.nodes, row.micro_batches, str(row.batch), *shown]
