"""Rounds of a short calibration and of real runs, in turns, so that both see the same minutes of a machine.

A virtual machine's speed changes within minutes, because its host has other guests. A calibration that is made before
the runs is one of another machine then. Here every round calibrates and runs every layout once; a record is a file of
JSON lines to which rounds are appended, rows of calibrations (they have a `part`) and of runs (they have a `tpot_ms`).
Within a round the machine changes too. So a piece of work that is always the same is timed between the stages of a
calibration and between runs (`pace`), and a run is told as it would have been at the pace of the calibrations.
Nodes lend no cores, as plans have it. It predicts nothing.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from afserve.cli.bench.calibrate import Grid
from afserve.cli.bench.case import Case
from afserve.cli.plan.catalog import read_lines

LAYOUTS = ((0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 2, 1), (1, 1, 1))
"""Nodes that only compute prompts, attention nodes, expert nodes; 0 expert nodes are colocated."""
PROMPT = 16  # short: prompts of late sequences are in the TPOT of early ones
PROMPT_APART = 64  # four blocks to hand over
ANSWER_APART = 512
"""Prompts that are read elsewhere come one after the other while others decode, a second or more until the last of 64;
shorter answers would be complete before all decode together."""
PACE = "pace"
_OFTEN, _PRODUCTS = 0.5, 25  # seconds; of the same work each time
SHORT = Grid(contexts=(96, 256), steps=3, calls=6, turns=3)

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch of one layout. `batch` counts the requests of all attention nodes; `prefill` nodes compute their
    prompts and are idle while the batch decodes. tpot_ms: what a client saw, median over requests. tok_s: while the
    whole batch decodes; low, high: over the rounds. yielded: tokens of a sequence's step, more than one with drafts.
    pace: seconds of the same work around it, 0 where that was not timed."""

    attention: int
    experts: int
    micro_batches: int
    threads: int
    batch: int
    context: float
    tpot_ms: float
    tok_s: float
    low: float = 0.0
    high: float = 0.0
    prefill: int = 0
    draft: str = "off"
    yielded: float = 1.0
    pace: float = 0.0

    def at(self, pace: float) -> "Measured":
        """As it would have been where the same work takes `pace` seconds; `pace` is then how many times as long it
        took."""
        longer = self.pace / pace if self.pace and pace else 1.0
        return replace(self, tpot_ms=self.tpot_ms / longer, tok_s=self.tok_s * longer, pace=longer)


@dataclass(frozen=True, slots=True)
class Record:
    """lines: of calibrations, by their threads. rounds: runs of each, every layout and batch once."""

    lines: Mapping[int, Sequence[str]]
    rounds: Sequence[Sequence[Measured]]

    def runs(self) -> list[Measured]:
        """Medians over the rounds, at the pace of the calibrations."""
        return [
            middle(run.at(self._pace(run.threads)) for run in runs) for runs in zip(*self.rounds, strict=True)
        ]

    def _pace(self, threads: int) -> float:
        """Of the calibrations, in the median; 0 where that was not timed."""
        rows = map(json.loads, self.lines[threads])
        timed = [float(row["seconds"]) for row in rows if row["part"] == PACE]
        return median(timed) if timed else 0.0


def read_record(path: Path) -> Record:
    lines: dict[int, list[str]] = {}
    rounds: dict[int, list[Measured]] = {}
    for line in filter(str.strip, read_lines(path, "record")):
        row = json.loads(line)
        if "part" in row:
            lines.setdefault(int(row["threads"]), []).append(line)
        else:
            named = {name: row[name] for name in Measured.__slots__ if name in row}
            rounds.setdefault(row["round"], []).append(Measured(**named))
    return Record(lines, list(rounds.values()))


def append_rounds(
    record: Path,
    count: int,
    case: Case,
    micro_batches: int,
    threads: int,
    grid: Grid,
    drafts: Sequence[str] = (),
) -> None:
    """Measures `count` rounds and appends each when it is whole. threads: of the colocated layout. drafts: such as
    mtp:2, colocated too."""
    from afserve.launch.plan.models import find_model

    done = len(read_record(record).rounds) if record.exists() else 0
    with TemporaryDirectory() as scratch:
        found = find_model(case.model, Path(scratch))
        for number in range(done, done + count):
            parts = (part(case, each, micro_batches, threads, grid, drafts) for each in sorted({1, threads}))
            rows = [row | {"round": number} for row in chain.from_iterable(parts)]
            with record.open("a") as file:
                file.write("".join(json.dumps(row | {"model": found.name}) + "\n" for row in rows))


def part(
    case: Case, each: int, micro_batches: int, threads: int, grid: Grid, drafts: Sequence[str]
) -> Iterator[Row]:
    """Of a round: a calibration with `each` threads, and the layouts that it is of."""
    yield from calibration(case.model, each, grid)
    for layout in LAYOUTS:
        if each == (1 if layout[2] else threads):
            yield from (asdict(run) for run in runs(case, layout, micro_batches if layout[2] else 1, each))
    for draft in drafts if each == threads else ():
        yield from (asdict(run) for run in drafted_runs(replace(case, threads=threads), draft))


def calibration(model: str, threads: int, grid: Grid) -> Iterator[Row]:
    """Its rows, and the pace wherever it measured for longer than that takes."""
    from afserve.cli.bench.calibrate import rows

    ended = 0.0
    for row in rows(model, threads, grid):
        if time.monotonic() - ended > _OFTEN:
            yield {"part": PACE, "seconds": pace(), "threads": threads}
        yield row | {"threads": threads}
        ended = time.monotonic()


def pace() -> float:
    """Seconds of products that read what a core's own caches do not hold, as decoding does: the median of a few."""
    weights, vector = np.ones((2048, 2048), np.float32), np.ones((2048, 8), np.float32)
    times = []
    for _ in range(_PRODUCTS):
        begun = time.perf_counter()
        weights @ vector
        times.append(time.perf_counter() - begun)
    return median(times)


def runs(case: Case, layout: tuple[int, int, int], micro_batches: int, threads: int) -> Iterator[Measured]:
    """Real processes, as `afserve bench decode` starts them."""
    from afserve.cli.bench.ours import Shape, measure

    prefill, attention, experts = layout
    shape = Shape(not experts, attention, experts or None, str(micro_batches), prefill, share_cores=False)
    if prefill:
        case = replace(case, prompt_len=PROMPT_APART, output_len=ANSWER_APART, repeats=1)
    before = pace()
    for row in measure(replace(case, threads=threads), shape):
        assert row.tpot is not None, "every sequence has more than one token"
        after = pace()
        yield Measured(
            attention=attention,
            experts=experts,
            micro_batches=micro_batches,
            threads=threads,
            batch=row.batch,
            context=case.prompt_len + case.output_len / 2,
            tpot_ms=row.tpot * 1e3,
            tok_s=row.tokens_per_second or row.batch / row.tpot,
            prefill=prefill,
            pace=(before + after) / 2,
        )
        before = after


def drafted_runs(case: Case, draft: str) -> Iterator[Measured]:
    """Colocated, all sizes on one start; medians as in `measure`."""
    from afserve.cli.bench.drafted import drafted_turns

    assert case.threads is not None, "a round gives them"
    found: dict[int, list[Measured]] = {}
    before = pace()
    for turn in drafted_turns(case, draft):
        after = pace()
        run = Measured(
            attention=1,
            experts=0,
            micro_batches=1,
            threads=case.threads,
            batch=turn.requests,
            context=case.prompt_len + case.output_len / 2,
            tpot_ms=turn.figures.tpot * 1e3,
            tok_s=turn.figures.tokens_per_second or turn.requests / turn.figures.tpot,
            draft=draft,
            yielded=turn.yielded,
            pace=(before + after) / 2,
        )
        found.setdefault(turn.requests, []).append(run)
        before = after
    yield from map(middle, found.values())


def middle(runs: Iterable[Measured]) -> Measured:
    """Medians of the same batch of the same layout; the range of its rates."""
    found = list(runs)
    rates = [run.tok_s for run in found]
    return replace(
        found[0],
        tpot_ms=median(run.tpot_ms for run in found),
        tok_s=median(rates),
        low=min(rates),
        high=max(rates),
        yielded=median(run.yielded for run in found),
        pace=median(run.pace for run in found),
    )
