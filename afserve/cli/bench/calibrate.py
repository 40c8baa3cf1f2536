"""`afserve bench calibrate`: measures this machine's stage times through the real engine, as rows for `afserve plan`.

The rows are: attention halves and whole steps by requests and context; expert calls by rows and distinct experts;
exchanges between two processes by size; the same in steps that are one native call, where nodes take them so; what the
control plane adds to a step; served steps with drafts, where the checkpoint has a layer that predicts them; how much
cores slow each other down; served runs of the smallest deployments; and how much the machine itself changed meanwhile.
Everything is measured in turns, so that a slow second of the machine is in no size alone. Nothing here is a prediction.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from afserve.cli.bench.report import measured_here
from afserve.cli.options import Within, output_file
from afserve.cli.settings import setting_option
from afserve.config import AUTO, THREADS, EngineSettings
from afserve.errors import ConfigError, shown
from afserve.kernels.isa import check_isa, used_isa
from afserve.launch.measure.others import CoreTime
from afserve.launch.plan.machine import this_machine

if TYPE_CHECKING:
    from afserve.cli.bench.case import Case
    from afserve.cli.bench.ours import Turn
    from afserve.cli.bench.stages import AttentionSide
    from afserve.config import ModelSource
    from afserve.engine.build import AnyBank

_CHANGED, _STOLEN = 0.10, 0.02
"""Of its speed, and of its cores' time: beyond these the user is told."""


def changed(ratio: float) -> str:
    """What to say of a machine whose stages took `ratio` times as long at the end as at the beginning."""
    if abs(ratio - 1) <= _CHANGED:
        return ""
    return (
        f"the machine changed: stages took {ratio - 1:+.0%} at the end. Plans are of its mean; measure again when "
        "it is steady, or plan with both files\n"
    )


def stolen(before: CoreTime, after: CoreTime) -> str:
    """What to say of core time that others had."""
    if (share := after.stolen_since(before)) <= _STOLEN:
        return ""
    return f"the host gave {share:.0%} of the cores' time to others meanwhile: runs will vary as much\n"


Row = dict[str, object]
_LASTS, _LONGER = 0.25, 8  # seconds; times
_CROWDED = 4  # cores: on more of them nobody starts more node processes than there are


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes to measure, each `turns` times: so many `steps`, or expert `calls`. `tokens` at most in all caches. Served
    runs have `served` sequences at once where experts are in the same process, `apart` where they are not, `rounds`
    times each; those with drafts, `drafted` tokens each, half as often."""

    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (96, 256, 1024)
    tokens: int = 16384
    steps: int = 5
    calls: int = 8
    turns: int = 6
    served: tuple[int, ...] = (1, 2, 12, 48)
    apart: tuple[int, ...] = (1, 2, 12, 48)
    prompt: int = 32
    output: int = 32
    rounds: int = 3
    drafted: tuple[int, ...] = (1, 3)
    isa: str = AUTO

    def lasting(self, token: float) -> "Grid":
        """With colocated answers so long that they take `_LASTS` seconds where a token takes `token`, or `_LONGER`
        times as long as the others: of one native call's tokens all come at once, and short answers are few calls."""
        longest = _LONGER * self.output
        return replace(self, output=int(min(max(_LASTS / token, self.output), longest)))

    def served_case(self, model: str, threads: int) -> "Case":
        """Colocated runs as `afserve up` starts them."""
        from afserve.cli.bench.case import Case

        return Case(model, self.served, self.prompt, self.output, self.rounds, threads, self.isa)

    @property
    def exchanged(self) -> tuple[int, ...]:
        """Requests of which exchanges are measured: every second size."""
        return self.requests if len(self.requests) < 4 else self.requests[::2]

    def points(self) -> Iterator[tuple[int, int]]:
        """(requests, context), the shortest context of every size first, the others of every second size."""
        for context in self.contexts:
            for number, requests in enumerate(self.requests):
                if context == self.contexts[0] or (number % 2 == 0 and requests * context <= self.tokens):
                    yield requests, context


SMALL = Grid((1, 2, 4), (24, 40), 128, 6, 4, 1, (1, 2, 3), (2,), 16, 28, 1, (1,))


@click.command()
@click.option("--model", default="nano", show_default=True, help="As for `afserve up`.")
@click.option(
    "--threads",
    default=1,
    show_default=True,
    type=Within(THREADS.low, THREADS.high, whole=True),
    help="Compute threads per node.",
)
@setting_option(EngineSettings, "isa")
@click.option("--quick", is_flag=True, help="A few sizes only, to see that it works.")
@click.option("--json", "as_json", is_flag=True, help="Also print the rows.")
@click.option("--out", required=True, type=output_file, help="The file to write, one row per line.")
def calibrate(model: str, threads: int, isa: str, quick: bool, as_json: bool, out: Path) -> None:
    """Measure stage times on this machine, one to four minutes; then `afserve plan --engine FILE`."""
    begin = time.perf_counter()
    _check_out(out)
    check_isa(isa)
    lines, before = [], CoreTime.now()
    known = {"model": Path(model).name, "threads": threads, "isa": used_isa(isa)}
    for row in rows(model, threads, replace(SMALL if quick else Grid(), isa=isa), begun=_tell_of_others):
        lines.append(json.dumps(row | known | measured_here(this_machine().cores)))
        if as_json:
            click.echo(lines[-1])
        if row["part"] == "changed":
            click.echo(changed(float(str(row["ratio"]))), err=True, nl=False)
    click.echo(stolen(before, CoreTime.now()), err=True, nl=False)
    try:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    click.echo(f"{len(lines)} rows in {time.perf_counter() - begin:.0f} s: {out}", err=True)


def _check_out(out: Path) -> None:
    """Before minutes of measuring."""
    if out.suffix != ".jsonl":
        raise ConfigError(
            f"--out {shown(str(out))}: the name must end in .jsonl, which `afserve plan --engine` reads"
        )
    if not os.access(out if out.exists() else out.absolute().parent, os.W_OK):
        raise ConfigError(f"--out {out}: it cannot be written; give another name")


def _tell_of_others() -> None:
    if (busy := os.getloadavg()[0]) >= 1:
        click.echo(f"others are at work here (load {busy:.1f}): stage times will be too long", err=True)


def rows(model: str, threads: int, grid: Grid, begun: Callable[[], None] = lambda: None) -> Iterator[Row]:
    """All measurements. `begun` is called once the model is found."""
    import tempfile

    from afserve.config import ModelSource
    from afserve.launch.plan.models import find_model

    with tempfile.TemporaryDirectory() as scratch:
        found = find_model(model, Path(scratch))
        if not found.weights:
            raise ConfigError(f"--model {model}: there are no weights here; pass a checkpoint folder")
        begun()
        yield from stages(ModelSource(str(found.folder), found.name), model, threads, grid)


def deployments(model: str, grid: Grid) -> Iterator[Row]:
    """Served runs with experts apart: one node of each kind, with one micro-batch, whose steps may be one call, and
    with two; and so many nodes of either kind that there is a process more than cores. What it costs to share a core is
    in no stage's own time. Half of the rounds each time."""
    from afserve.cli.bench.case import Case
    from afserve.cli.bench.ours import Shape, in_turns

    cores = this_machine().cores
    crowds = [(1, cores, 2), (cores, 1, 2)] if 1 < cores <= _CROWDED else []
    case = Case(model, grid.apart, grid.prompt, grid.output, (grid.rounds + 1) // 2, 1, grid.isa)
    found: dict[tuple[int, int, int, int], list[float]] = {}
    for _ in range(1 if grid.rounds == 1 else 2):
        for attention, experts, micro_batches in [(1, 1, 1), (1, 1, 2), *crowds]:
            shape = Shape(False, attention, experts, str(micro_batches), share_cores=False)
            for turn in in_turns(case, shape):
                found.setdefault((attention, experts, micro_batches, turn.requests), []).append(turn.seconds)
    for (attention, experts, micro_batches, requests), seconds in found.items():
        yield run_row(grid, attention, experts, micro_batches, requests, seconds)


def run_row(
    grid: Grid, attention: int, experts: int, micro_batches: int, requests: int, seconds: list[float]
) -> Row:
    """A served run: seconds from a token to the same request's next, while all decode, of each turn. 0 experts:
    colocated."""
    return {
        "part": "run", "requests": requests, "context": grid.prompt + grid.output / 2, "attention": attention,
        "experts": experts, "micro_batches": micro_batches, "seconds": median(seconds),
    }  # fmt: skip


def stages(source: "ModelSource", model: str, threads: int, grid: Grid) -> Iterator[Row]:
    """What follows from one engine in this process, and nodes beside it for the exchange."""
    import torch

    from afserve.cli.bench.drafted import drafted_rows
    from afserve.cli.bench.neighbour import beside_rows
    from afserve.cli.bench.ours import Shape, in_turns
    from afserve.cli.bench.stages import WARM, AttentionPoint, AttentionSide, ExpertCalls
    from afserve.kernels.ops import open_ops

    ops = open_ops("cpu", threads, isa=grid.isa)
    torch.set_num_threads(1 if ops.backend_name == "native" else threads)
    most = (grid.steps + WARM) * (grid.turns + 1)
    room = grid.prompt + _LONGER * grid.output
    longest = max(*grid.contexts, room) + 2 * max(*grid.requests, *grid.served)
    engine = AttentionSide(source, ops, longest + 2 * most + served_steps(grid))
    bank = engine.bank()
    points = [AttentionPoint(engine, *point, grid.steps, grid.turns + 1) for point in grid.points()]
    calls = {
        (tokens, share, held): ExpertCalls(engine, bank, tokens, share, held)
        for tokens in grid.requests
        for share, held in ((1.0, 1.0), (1.0, 0.5), (0.25, 1.0))
    }

    def turn() -> None:
        for point in points:
            point.turn()
        for call in calls.values():
            call.turn(grid.calls)

    for _ in range(grid.turns):
        turn()
    for point in points:
        yield from point.rows()
    for call in calls.values():
        yield call.row()
    took = {
        (tokens, round(1 / held)): call.median_seconds
        for (tokens, share, held), call in calls.items()
        if share == 1
    }
    yield from exchanges(engine, grid, took)
    yield from wholes(engine, grid, {p.requests: median(p.halves) for p in reversed(points)})
    first = grid.requests[0]
    lasting = grid.lasting(engine.spec.layers * (median(points[0].halves) + took[first, 1]))
    case = lasting.served_case(model, threads)
    yield from serving(engine, bank, lasting, in_turns(case, Shape(colocated=True, attention=1)))
    case = replace(case, repeats=(grid.rounds + 1) // 2)
    yield from drafted_rows(source, case, grid.drafted)
    if threads == 1:
        yield from deployments(model, grid)
        yield from beside_rows(engine, bank, grid.requests[-2], grid.contexts[0], grid.steps, grid.turns)
    turn()
    measured = [point.halves for point in points] + [call.turns for call in calls.values()]
    yield {"part": "changed", "ratio": median(turns[-1] / median(turns[:-1]) for turns in measured)}


def exchanges(engine: "AttentionSide", grid: Grid, calls: dict[tuple[int, int], float]) -> Iterator[Row]:
    """With one expert node and with two, every second size; with two, only what the attention node has to do is told.

    `calls`: seconds of an expert call by requests and nodes.
    """
    from afserve.cli.bench.exchange import ExchangePoint, exchange
    from afserve.cli.bench.stages import WARM

    for peers in (1, 2):
        with exchange(engine.source, peers, engine.clock) as made:
            points = [
                ExchangePoint(
                    engine,
                    made,
                    calls[requests, peers],
                    requests,
                    grid.contexts[0],
                    (grid.steps + WARM) * grid.turns,
                )
                for requests in grid.exchanged
            ]
            for _ in range(grid.turns):
                for point in points:
                    point.turn(grid.steps)
            for point in points:
                yield from point.rows()


def wholes(engine: "AttentionSide", grid: Grid, halves: dict[int, float]) -> Iterator[Row]:
    """As `exchanges`, of steps in one call; nothing where nodes of this model take none. `halves`: seconds of a layer's
    attention half by requests, at the first context."""
    from afserve.cli.bench.exchange import exchange
    from afserve.cli.bench.stages import WARM
    from afserve.cli.bench.whole import NODE, WholePoint

    most = (grid.steps + WARM) * grid.turns
    for peers in (1, 2):
        with exchange(engine.source, peers, engine.clock, NODE, grid.isa) as made:
            points = [
                WholePoint(engine, made, halves[requests], requests, grid.contexts[0], most)
                for requests in grid.exchanged
            ]
            for number in range(grid.turns):
                for point in points:
                    point.turn(grid.steps)
                if number == 0 and not any(point.in_one_call for point in points):
                    return
            for point in points:
                yield from point.rows()


def served_steps(grid: Grid) -> int:
    """That the engine by itself takes beside the served runs, at most."""
    from afserve.cli.bench.stages import WARM
    from afserve.engine.step.stack_runner import MOST_PASSES

    return 2 * (grid.steps + WARM + 2 * MOST_PASSES) * (grid.rounds + 1)


def serving(engine: "AttentionSide", bank: "AnyBank", grid: Grid, served: "Iterator[Turn]") -> Iterator[Row]:
    """The served runs' rows, and how much longer their steps are than those of the same engine by itself, measured
    right before and right after each: a machine's speed drifts by more than the control plane costs."""
    from afserve.cli.bench.stages import WARM, Decoding
    from afserve.comm.m2n.bank import LocalBankLink, LocalTicket

    context, most = grid.prompt + grid.output // 2, served_steps(grid)
    alone: dict[int, Decoding[LocalTicket]] = {}
    for requests in grid.served:
        alone[requests] = engine.decode_batch(LocalBankLink(bank), requests, context, most)

    def engine_step(requests: int) -> float:
        alone[requests].go(WARM)
        return alone[requests].go(grid.steps).seconds

    own = engine_step(grid.served[0])
    found: dict[int, list[tuple[float, float, float]]] = {requests: [] for requests in grid.served}
    for number, turn in enumerate(served, start=1):
        own = (own + engine_step(turn.requests)) / 2
        found[turn.requests].append((turn.seconds, own, turn.gateway))
        own = engine_step(grid.served[number % len(grid.served)])
    for requests, turns in found.items():
        runs, owns, gateways = zip(*turns, strict=True)
        row = run_row(grid, 1, 0, 1, requests, list(runs))
        whole = float(str(row["seconds"]))
        more = whole - median(whole * one / run for one, run in zip(owns, runs, strict=True))
        yield {"part": "gateway", "requests": requests, "seconds": max(median(gateways), 1e-7)}
        yield {"part": "control", "requests": requests, "seconds": max(more, 0.005 * whole), "served": whole}
        yield row
