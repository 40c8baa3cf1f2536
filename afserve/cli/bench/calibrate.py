"""`afserve bench calibrate`: measures this machine's stage times through the real engine, as rows for `afserve plan`.

The rows are: attention halves and whole steps by requests and context; expert calls by rows and distinct experts;
exchanges between two processes by size; what the control plane adds to a step; how much cores slow each other down; and
the cost of more processes than cores. Nothing here is a prediction.
"""

import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from afserve.errors import ConfigError

if TYPE_CHECKING:
    from afserve.cli.bench.stages import Engine
    from afserve.config import ModelSource
    from afserve.models.experts import ExpertBank

Row = dict[str, object]
_CROWDED = 4  # cores: on more of them nobody starts more node processes than there are
_WARM_UP = 2  # sequences of the control plane's first batch, which is not counted


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes to measure. `steps` of each; `tokens` at most in all caches; `control`, `crowd`: sequences at once."""

    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (96, 256, 1024)
    tokens: int = 8192
    steps: int = 24
    control: tuple[int, ...] = (2, 6, 20, 48)
    crowd: tuple[int, ...] = (4, 12, 24, 48)
    prompt: int = 64
    repeats: int = 3

    @property
    def output(self) -> int:
        """Tokens of a served sequence: most of them while all others decode too."""
        return 2 * self.steps + 16

    def points(self) -> Iterator[tuple[int, int]]:
        """(requests, context), the shortest context of every size first."""
        for context in self.contexts:
            for requests in self.requests:
                if context == self.contexts[0] or requests * context <= self.tokens:
                    yield requests, context


SMALL = Grid((1, 2, 4), (24, 40), 128, 6, (1, 2, 3), (2,), 16, 1)


@click.command()
@click.option("--model", default="nano", show_default=True, help="As for `afserve up`.")
@click.option(
    "--threads", default=1, show_default=True, type=click.IntRange(1), help="Compute threads per node."
)
@click.option("--quick", is_flag=True, help="A few sizes only, to see that it works.")
@click.option("--json", "as_json", is_flag=True, help="Also print the rows.")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write, one row per line.",
)
def calibrate(model: str, threads: int, quick: bool, as_json: bool, out: Path) -> None:
    """Measure stage times on this machine, about a minute; then `afserve plan --curves FILE`."""
    begin = time.perf_counter()
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}", param="out")
    if (busy := os.getloadavg()[0]) >= 1:
        click.echo(f"others are at work here (load {busy:.1f}): stage times will be too long", err=True)
    lines = []
    for row in rows(model, threads, SMALL if quick else Grid()):
        lines.append(json.dumps(row | origin(model, threads)))
        if as_json:
            click.echo(lines[-1])
    try:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}", param="out") from error
    click.echo(f"{len(lines)} rows in {time.perf_counter() - begin:.0f} s: {out}", err=True)


def origin(model: str, threads: int) -> Row:
    """What every row carries."""
    from afserve.cli.bench.report import commit, processor
    from afserve.launch.machine import this_machine

    return {
        "model": Path(model).name,
        "threads": threads,
        "machine": f"{processor()}, {this_machine().cores} cores",
        "load": round(os.getloadavg()[0], 1),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
    }


def rows(model: str, threads: int, grid: Grid) -> Iterator[Row]:
    """All measurements."""
    import tempfile

    from afserve.config import ModelSource
    from afserve.launch.machine import this_machine
    from afserve.launch.models import find_model

    with tempfile.TemporaryDirectory() as scratch:
        found = find_model(model, Path(scratch))
        if not found.weights:
            raise ConfigError(
                f"--model {model}: there are no weights here; pass a checkpoint folder", param="model"
            )
        yield from stages(ModelSource(str(found.folder), found.name), model, threads, grid)
        if threads == 1 and this_machine().cores <= _CROWDED:
            yield from crowded(model, grid)


def control(model: str, threads: int, grid: Grid) -> Iterator[Row]:
    """A colocated run as `afserve up` starts it: seconds per step, and processor seconds of the gateway in each. Its
    nodes are parked while the caller holds on to a row."""
    from afserve.cli.bench.case import Case
    from afserve.cli.bench.ours import Shape, measure

    case = Case(model, (_WARM_UP, *grid.control), grid.prompt, grid.output, grid.repeats, threads)
    measured = measure(case, Shape(colocated=True, attention=1))
    next(measured)
    spent = time.process_time()
    for row in measured:
        gateway = (time.process_time() - spent) / (grid.repeats * grid.output)
        yield {"part": "gateway", "requests": row.batch, "seconds": max(gateway, 1e-7)}
        assert row.tpot is not None
        seconds = row.batch / row.tokens_per_second if row.tokens_per_second else row.tpot
        yield {"part": "served", "requests": row.batch, "seconds": max(seconds, 1e-6)}
        spent = time.process_time()


def crowded(model: str, grid: Grid) -> Iterator[Row]:
    """Served runs with a node process more than this machine has cores: seconds from a token to the same request's
    next. What it costs to share a core is in no stage's own time."""
    from afserve.cli.bench.case import Case
    from afserve.cli.bench.ours import Shape, measure
    from afserve.launch.machine import this_machine

    nodes = this_machine().cores
    case = Case(model, grid.crowd, grid.prompt, grid.output, grid.repeats, 1)
    for row in measure(case, Shape(False, 1, nodes, "2")):
        assert row.tpot is not None
        yield {
            "part": "crowded", "requests": row.batch, "context": grid.prompt + grid.output / 2, "attention": 1,
            "experts": nodes, "micro_batches": 2, "seconds": row.tpot,
        }  # fmt: skip


def stages(source: "ModelSource", model: str, threads: int, grid: Grid) -> Iterator[Row]:
    """What follows from one engine in this process, and nodes beside it for the exchange."""
    import torch

    from afserve.cli.bench.neighbour import beside_rows
    from afserve.cli.bench.stages import Engine, attention_rows, expert_rows
    from afserve.kernels.ops import open_ops

    ops = open_ops("cpu", threads)
    torch.set_num_threads(1 if ops.backend_name == "native" else threads)
    engine = Engine(source, ops, max(grid.contexts) + 2 * max(grid.requests) + 4 * grid.steps)
    for requests, context in grid.points():
        yield from attention_rows(engine, requests, context, grid.steps)
    bank, calls = engine.bank(), {}
    for tokens in grid.requests:
        for share, held in ((1.0, 1.0), (1.0, 0.5), (0.25, 1.0)):
            row = expert_rows(engine, bank, tokens, share, held)
            if share == 1.0:
                calls[tokens, round(1 / held)] = float(str(row["seconds"]))
            yield row
    yield from exchanges(engine, grid, calls)
    yield from serving(engine, bank, grid, control(model, threads, grid))
    if threads == 1:
        yield from beside_rows(engine, bank, grid.requests[-2], grid.contexts[0], grid.steps)


def exchanges(engine: "Engine", grid: Grid, calls: dict[tuple[int, int], float]) -> Iterator[Row]:
    """With one expert node and with two; with two, only what the attention node has to do is told.

    `calls`: seconds of an expert call by requests and nodes.
    """
    from afserve.cli.bench.exchange import exchange, exchange_rows
    from afserve.cli.bench.marked import MarkedLink

    context = grid.contexts[0]
    for peers in (1, 2):
        with exchange(engine.source, peers) as made:
            for requests in grid.requests:
                alone = engine.steps(
                    MarkedLink(engine.clock, engine.spec.hidden), requests, context, grid.steps
                )
                took = calls[requests, peers]
                yield from exchange_rows(engine, alone, made, took, requests, context, grid.steps)


def serving(engine: "Engine", bank: "ExpertBank", grid: Grid, served: Iterator[Row]) -> Iterator[Row]:
    """The served run's rows, and how much longer its steps are than those of the same engine by itself, measured right
    before and right after each: a machine's speed drifts by more than the control plane costs."""
    from afserve.comm.m2n.bank import LocalBankLink

    def alone(requests: int) -> float:
        return engine.steps(LocalBankLink(bank), requests, grid.prompt + grid.output // 2, grid.steps).seconds

    sizes = iter(grid.control)
    before = alone(next(sizes))
    for row in served:
        yield row
        if row["part"] == "served":
            requests, whole = int(str(row["requests"])), float(str(row["seconds"]))
            seconds = max(whole - (before + alone(requests)) / 2, 0.005 * whole)
            yield {"part": "control", "requests": requests, "seconds": seconds, "served": whole}
            before = sum(alone(following) for following in itertools.islice(sizes, 1))
