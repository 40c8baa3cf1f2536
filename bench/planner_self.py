"""The planner against afserve itself on this machine: stage times in, real runs beside their predictions, errors out.

    afserve bench calibrate --model DIR --threads 1 --out one.jsonl        and with --threads 2 for the colocated mode
    python -m bench.planner_self --model DIR --calibration one.jsonl two.jsonl [--measured FILE] [--out FILE]

Layouts are colocated, AFD, and AFD with prompts on a node of their own, which hands their KV over and is idle while
the batch decodes. Nothing is fitted to the measured runs. The planner's curves give the stage times of each layout;
colocated, its closed form gives the step. Disaggregated, the closed form gives every process hardware of its own, but
here all processes (and the gateway, which works for every token) share the machine's cores: `shared_cores.py` plays the
same stage times over so many cores, longer where another core is busy by as much as the calibration measured. A
calibration also serves a few batches itself: colocated, with one expert node, and with a process more than cores. What
its runs took over their stages is taken over to all runs of that kind, at other batches, prompts and layouts (2x1 and
prompts apart are in no calibration). The rate is that of the steady state, while the whole batch decodes; TPOT is what
a client saw, median over requests. Calibrations with equal threads are fitted together: made before and after the runs
they bridge a machine whose speed drifts. The threads of a run are taken, else the nearest.
A virtual machine's speed changes within minutes. The pace of bare expert calls on two cores is taken around the runs of
the calibration and around each run here, and a prediction is moved by their ratio; its error without that is told too.
Nodes lend no cores, as plans have it.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from afserve.cli.bench.case import Case
from afserve.cli.catalog import load_hardware, load_model, read_lines
from afserve.placement.planner.calibration import bend_through, fit_calibration, read_calibration
from afserve.placement.planner.perf import afd_stages, colocated_stages, expert_half
from afserve.placement.planner.perf_attention import Precision
from afserve.placement.planner.perf_curve import Curve
from afserve.placement.planner.perf_experts import Routing
from afserve.placement.planner.perf_ffn import distinct_targets
from afserve.placement.planner.setting import Setting
from afserve.placement.planner.workload import fixed_context
from bench.origin import origin
from bench.shared_cores import Stages, step_seconds

CHIP = "cpu-host"
LAYOUTS = ((0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 2, 1), (1, 1, 1))
"""Nodes that only compute prompts, attention nodes, expert nodes; 0 expert nodes are colocated."""
PROMPT = 16  # short: prompts of late sequences are in the TPOT of early ones
PROMPT_APART = 64  # four blocks to hand over
WIDTH = Precision("bf16", "bf16", "bf16")

Row = dict[str, object]
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch of one layout, medians over repeats. `batch` counts the requests of all attention nodes; `prefill`
    nodes compute their prompts and are idle while the batch decodes. pace: seconds of an expert call on the machine
    around the run, 0 where it is not known."""

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
    pace: float = 0.0


class Predictor:
    """One model on this machine, from calibrations by their threads."""

    def __init__(self, model: str, calibrations: Iterable[Path], cores: int) -> None:
        self._shape, self._chip, self._cores = load_model(model), load_hardware(CHIP), cores
        self._curves = {}
        self._beside = {"attention": 1.0, "experts": 1.0}
        self._runs: dict[bool, Curve] = {}
        self._paces: dict[tuple[int, bool], float] = {}
        found: dict[int, list[str]] = {}
        for path in calibrations:
            for line in filter(str.strip, read_lines(path, "calibration")):
                found.setdefault(int(json.loads(line).get("threads", 1)), []).append(line)
        for threads, lines in found.items():
            source = f"calibration with {threads} threads"
            self._beside |= _beside(lines)
            rows = read_calibration(source, lines)
            self._curves[threads] = fit_calibration(source, rows, self._shape, self._chip, WIDTH)
        apart = [
            row for row in map(json.loads, found.get(1, [])) if row.get("part") == "run" and row["experts"]
        ]
        self._runs = self._served(apart)
        for threads, lines in found.items():
            for apart_too in (False, True):
                paces = [
                    row["pace"]
                    for row in map(json.loads, lines)
                    if "pace" in row and bool(row["experts"]) == apart_too
                ]
                if paces:
                    self._paces[threads, apart_too] = median(paces)

    def _served(self, rows: Iterable[Mapping[str, float]]) -> dict[bool, Curve]:
        """What served runs took over what this says of them without any: where processes outnumber cores, or not."""
        ratios: dict[bool, list[tuple[float, float]]] = {}
        for row in rows:
            run = Measured(
                int(row["attention"]),
                int(row["experts"]),
                int(row["micro_batches"]),
                1,
                int(row["requests"]),
                row["context"],
                0.0,
                0.0,
            )
            ratio = row["seconds"] / self.tpot(run)
            ratios.setdefault(self._crowded(run), []).append((row["requests"], ratio))
        return {crowded: Curve(0.0, 1.0, 1.0, bend=bend_through(found)) for crowded, found in ratios.items()}

    def _crowded(self, run: Measured) -> bool:
        """One micro-batch is either with the attention node or with the expert nodes."""
        ranks = min(run.attention, run.batch)
        micro_batches = min(run.micro_batches, run.batch // ranks)
        busy = ranks + run.experts if ranks * micro_batches > 1 else run.experts
        return busy > self._cores

    @property
    def threads(self) -> int:
        """The most that any calibration was made with."""
        return max(self._curves)

    def at_pace(self, run: Measured) -> float:
        """How much slower the machine was around the run than around the calibration's own; 1 where it is not known."""
        known = self._paces.get((self._threads(run), run.experts > 0))
        return run.pace / known if known and run.pace else 1.0

    def _threads(self, run: Measured) -> int:
        return min(self._curves, key=lambda known: abs(known - run.threads))

    def tpot(self, run: Measured) -> float:
        """Seconds per token at the calibration's pace. A batch smaller than all micro-batches fills only some."""
        threads = self._threads(run)
        setting = Setting(self._shape, self._curves[threads], fixed_context(run.context), WIDTH, Routing(0.0))
        ranks = min(run.attention, run.batch)
        micro_batches = min(run.micro_batches, run.batch // ranks)
        each = run.batch / ranks / micro_batches
        if run.experts == 0:
            one = np.ones(1)
            return float(colocated_stages(setting, self._chip, 1, micro_batches, one, one * each).tpot[0])
        served = self._runs.get(self._crowded(run)) or self._runs.get(False)
        longer = float(served.bent(np.array([run.batch / ranks]))[0]) if served else 1.0  # type: ignore[index]
        return longer * step_seconds(
            self._stages(setting, ranks, run.experts, micro_batches, each),
            cores=max(1, self._cores // threads),
            ranks=ranks,
            expert_nodes=run.experts,
            micro_batches=micro_batches,
            layers=self._shape.experts.layers,
        )

    def _stages(self, setting: Setting, ranks: int, nodes: int, micro_batches: int, each: float) -> Stages:
        chip, curves = self._chip, setting.curves.curves
        devices, batch = np.array([float(nodes)]), np.array([each])
        alone = afd_stages(setting, chip, chip, 1, micro_batches, np.ones(1), devices, batch)
        here = batch * distinct_targets(setting.shape.experts.top_k, devices) / devices
        messages = range(1, ranks * micro_batches + 1)

        def calls(by_chance: bool) -> Array:
            halves = [expert_half(setting, chip, n * batch, devices, by_chance=by_chance) for n in messages]
            answers = [setting.exchange_at_experts(here, np.array([float(n)])) for n in messages]
            return np.concatenate(halves) + np.concatenate(answers)

        most, mean = calls(True), calls(False)
        return Stages(
            attention=float(alone.attention[0]),
            outside=float(alone.outside[0]),
            experts=most.tolist(),
            others=((nodes * mean - most) / (nodes - 1)).tolist() if nodes > 1 else (),
            dispatch=float(alone.dispatch[0]),
            combine=float(alone.combine[0]),
            gateway=curves["gateway"].launch + each * curves["gateway"].per_group,
            attention_beside=self._beside["attention"],
            experts_beside=self._beside["experts"],
        )


def _beside(lines: Iterable[str]) -> dict[str, float]:
    """How many times as long a stage takes while another core is busy: the median of what was measured."""
    rows = [row for row in map(json.loads, lines) if row.get("part") == "beside"]
    return {
        stage: max(1.0, median(row["seconds"] / row["alone"] for row in rows if row["stage"] == stage))
        for stage in {row["stage"] for row in rows}
    }


def runs(case: Case, micro_batches: int, colocated_threads: int) -> Iterator[Measured]:
    """Layouts in turn, as often as the case repeats, so that a slow minute of the machine is no layout's own."""
    from afserve.cli.bench.pace import pace
    from afserve.config import ModelSource
    from afserve.launch.models import find_model

    with TemporaryDirectory() as scratch:
        found = find_model(case.model, Path(scratch))
        with pace(ModelSource(str(found.folder), found.name)) as take:
            rounds = [
                list(one_round(case, micro_batches, colocated_threads, take)) for _ in range(case.repeats)
            ]
    return (middle(runs) for runs in zip(*rounds, strict=True))


def one_round(
    case: Case, micro_batches: int, colocated_threads: int, pace: Callable[[], float]
) -> Iterator[Measured]:
    """Real processes, as `afserve bench decode` starts them."""
    from afserve.cli.bench.ours import Shape, measure

    for prefill, attention, experts in LAYOUTS:
        m, threads = (micro_batches, 1) if experts else (1, colocated_threads)
        shape = Shape(not experts, attention, experts or None, str(m), prefill, share_cores=False)
        length = PROMPT_APART if prefill else case.prompt_len
        context = length + case.output_len / 2
        before = pace()
        for row in measure(replace(case, prompt_len=length, threads=threads, repeats=1), shape):
            assert row.tpot is not None
            after = pace()
            rate = row.tokens_per_second or row.batch / row.tpot
            yield Measured(
                attention,
                experts,
                m,
                threads,
                row.batch,
                context,
                row.tpot * 1e3,
                rate,
                prefill=prefill,
                pace=(before + after) / 2,
            )
            before = after


def middle(runs: Sequence[Measured]) -> Measured:
    """Medians of the same batch of the same layout; the range of its rates."""
    rates = [run.tok_s for run in runs]
    tpot = median(run.tpot_ms for run in runs)
    paces = [run.pace for run in runs]
    return replace(
        runs[0], tpot_ms=tpot, tok_s=median(rates), low=min(rates), high=max(rates), pace=median(paces)
    )


def judged(predictor: Predictor, run: Measured) -> Row:
    steady = predictor.tpot(run)
    tpot = steady * predictor.at_pace(run)
    layout = f"{run.attention}x{run.experts}" if run.experts else "colocated"
    if run.prefill:
        layout = f"prefill {run.prefill}, decode {layout}"
    return {
        "claim": "afserve on this CPU",
        "case": f"{layout}, m {run.micro_batches}, batch {run.batch}",
        **{name: getattr(run, name) for name in Measured.__slots__},
        "predicted_tpot_ms": round(tpot * 1e3, 4),
        "predicted_tok_s": round(run.batch / tpot, 2),
        "tpot_error": round(tpot * 1e3 / run.tpot_ms - 1, 4),
        "steady_tpot_error": round(steady * 1e3 / run.tpot_ms - 1, 4),
        "tok_s_error": round(run.batch / tpot / run.tok_s - 1, 4),
    }


def compare(calibration: Path, measured: Path, model: str) -> list[Row]:
    """For `bench/planner.py`: the rows of an earlier run predicted anew."""
    predictor = Predictor(model, [calibration], cores())
    return [judged(predictor, run) for run in earlier(measured)]


def earlier(path: Path) -> list[Measured]:
    rows = [json.loads(line) for line in read_lines(path, "measured")]
    return [_measured(row) for row in rows if "tpot_ms" in row]


def _measured(row: Mapping[str, float]) -> Measured:
    return Measured(**{name: row[name] for name in Measured.__slots__ if name in row})  # type: ignore[arg-type]


def kind(row: Mapping[str, object]) -> str:
    """Of a judged row: colocated, AFD, or AFD with prompts apart."""
    if row.get("prefill"):
        return "prompts apart"
    return "AFD" if row["experts"] else "colocated"


def summaries(rows: list[Row]) -> list[Row]:
    """Of each kind of layout, and of all."""
    kinds = dict.fromkeys(kind(row) for row in rows)
    return [*(summary([row for row in rows if kind(row) == one], one) for one in kinds), summary(rows)]


def summary(rows: list[Row], of: str = "all") -> Row:
    """Medians of absolute errors."""
    return {
        "claim": "afserve on this CPU",
        "case": f"median of {len(rows)}" if of == "all" else f"{of}, median of {len(rows)}",
        "tpot_error": round(median(abs(float(str(row["tpot_error"]))) for row in rows), 4),
        "tok_s_error": round(median(abs(float(str(row["tok_s_error"]))) for row in rows), 4),
        "steady_tpot_error": round(median(abs(float(str(row["steady_tpot_error"]))) for row in rows), 4),
    }


def show(row: Row) -> None:
    print(
        f"{row['case']:<34}{row['tpot_ms']:>10.2f}{row['predicted_tpot_ms']:>10.2f}{row['tpot_error']:>+9.1%}"
        f"{row['tok_s']:>10.0f}{row['predicted_tok_s']:>10.0f}{row['tok_s_error']:>+9.1%}",
        flush=True,
    )


def cores() -> int:
    return len(os.sched_getaffinity(0))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planner_self", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the checkpoint folder that was calibrated")
    parser.add_argument("--calibration", required=True, type=Path, nargs="+", help="afserve bench calibrate")
    parser.add_argument("--measured", type=Path, help="rows of an earlier run; nothing is measured then")
    parser.add_argument("--batch", default="1,8,32,64", help="requests at a time, comma-separated")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=2, help="of the disaggregated layouts")
    parser.add_argument("--out", type=Path, help="write the rows here")
    given = parser.parse_args(arguments)
    predictor = Predictor(given.model, given.calibration, cores())
    batches = tuple(int(batch) for batch in given.batch.split(","))
    case = Case(given.model, batches, PROMPT, given.output_len, given.repeats)
    found = earlier(given.measured) if given.measured else runs(case, given.micro_batches, predictor.threads)
    print(f"{'':<34}{'TPOT ms':>10}{'planned':>10}{'error':>9}{'tok/s':>10}{'planned':>10}{'error':>9}")
    rows = []
    for run in found:
        rows.append(judged(predictor, run))
        show(rows[-1])
    totals = summaries(rows)
    for one in totals:
        errors = f"TPOT {one['tpot_error']:.1%}, throughput {one['tok_s_error']:.1%}"
        errors += f"; TPOT without the machine's pace {one['steady_tpot_error']:.1%}"
        print(f"{one['case']}, absolute errors: {errors}")
    if given.out:
        known = {"model": Path(given.model).name, **origin()}
        given.out.write_text("".join(json.dumps(row | known) + "\n" for row in [*rows, *totals]))


if __name__ == "__main__":
    main()
