"""What `afserve plan` says of afserve itself on this machine, beside real runs: errors out.

    python -m bench.planner_self --model DIR --record FILE --rounds 2      measures two rounds, appends them, judges all
    python -m bench.planner_self --model DIR --record FILE [--save]        judges what is there
    python -m bench.planner_self --model nano --draft mtp:1,mtp:3 --record FILE --rounds 2      with drafts, too

Layouts are colocated, AFD, and AFD with prompts on a node of their own, which hands their KV over and is idle while
the batch decodes. Each is typed as `afserve plan` arguments, with a calibration as --engine, and judged on the printed
JSON. Nothing is fitted to the measured runs. A calibration serves a few batches itself: colocated, with one node of
each kind, with a process more than cores of either kind, and with drafts where the model has a layer for them. Prompts
apart are in no calibration, and neither are the contexts of the runs and 8, 32 and 64 requests. A plan with drafts is
told how many tokens a step yielded, and says how long it takes. The rate is that of the steady state, while the whole
batch decodes; TPOT is what a client saw, median over requests. Calibrations and runs take turns (`planner_rounds.py`):
all rows of equal threads are one calibration, and runs count by their medians, each at the pace that the machine had in
the calibrations. The threads of a run are taken.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from afserve.cli.bench.case import Case
from afserve.config import AUTO
from bench.origin import origin
from bench.planner_rounds import PROMPT, PROMPT_APART, SHORT, Measured, Record, append_rounds, read_record
from bench.planner_typed import say
from bench.rows import RESULTS

Row = dict[str, object]


def typed(model: str, calibration: Path, cores: int, run: Measured) -> list[str]:
    """The arguments of `afserve plan` that ask about one run."""
    lengths = f"--context {run.context:g}"
    if run.prefill:
        answer = 2 * (run.context - PROMPT_APART)
        lengths = f"--input {PROMPT_APART} --output {answer:g} --decode-only --prefill-devices {run.prefill}"
    line = (
        f"--model {model} --pool cpu-host={run.attention + run.experts + run.prefill} --precision bf16 --skew 0 "
        f"{lengths} --concurrency {run.batch} --micro-batches {run.micro_batches} --engine {calibration}"
    )
    if run.draft != "off":
        most = int(run.draft.partition(":")[2])
        lengths = ",".join(f"{min(run.yielded, count + 1):g}" for count in range(1, most + 1))
        line = f"{line} --draft {run.draft} --acceptance {lengths}"
    if not run.experts:
        return f"{line} --kind colocated --devices 1".split()
    nodes = f"--attention-devices {run.attention} --expert-devices {run.experts}"
    return f"{line} --kind afd {nodes} --cores {cores}".split()


def judged_all(model: str, record: Record, cores: int) -> list[Row]:
    with TemporaryDirectory() as folder:
        files = {threads: Path(folder) / f"threads-{threads}.jsonl" for threads in record.lines}
        for threads, lines in record.lines.items():
            files[threads].write_text("\n".join(lines))
        return [judged(say(typed(model, files[run.threads], cores, run)), run) for run in record.runs()]


def judged(answer: Mapping[str, object], run: Measured) -> Row:
    best = answer["best"]
    assert isinstance(best, Mapping), "an answer has a best plan"
    tpot_ms = float(best["tpot_ms"])
    rate = run.batch / tpot_ms * 1e3
    layout = f"{run.attention}x{run.experts}" if run.experts else "colocated"
    if run.prefill:
        layout = f"prefill {run.prefill}, decode {layout}"
    if run.draft != "off":
        layout = f"{layout}, {run.draft}"
    return {
        "claim": "afserve on this CPU",
        "case": f"{layout}, m {run.micro_batches}, batch {run.batch}",
        **{name: getattr(run, name) for name in Measured.__slots__},
        "predicted_tpot_ms": round(tpot_ms, 4),
        "predicted_tok_s": round(rate, 2),
        "tpot_error": round(tpot_ms / run.tpot_ms - 1, 4),
        "tok_s_error": round(rate / run.tok_s - 1, 4),
    }


def kind(row: Mapping[str, object]) -> str:
    """Of a judged row: colocated, AFD, AFD with prompts apart, or drafts."""
    if row.get("draft", "off") != "off":
        return "drafts"
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
    }


def show(row: Row) -> None:
    print(
        f"{row['case']:<34}{row['tpot_ms']:>10.2f}{row['predicted_tpot_ms']:>10.2f}{row['tpot_error']:>+9.1%}"
        f"{row['tok_s']:>10.0f}{row['predicted_tok_s']:>10.0f}{row['tok_s_error']:>+9.1%}",
        flush=True,
    )


def _of(row: Mapping[str, object]) -> tuple[object, object]:
    """Whose rows newer ones replace."""
    return row["model"], row["isa"]


def cores() -> int:
    return len(os.sched_getaffinity(0))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planner_self", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the checkpoint folder that is calibrated and runs")
    parser.add_argument("--record", required=True, type=Path, help="the file of rounds")
    parser.add_argument("--rounds", type=int, default=0, help="measure so many more, about two minutes each")
    parser.add_argument("--isa", default=AUTO, help="the most that kernels use, such as avx2")
    parser.add_argument("--turns", type=int, default=3, help="each run so often in a round, medians")
    parser.add_argument("--batch", default="1,8,32,64", help="requests at a time, comma-separated")
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--micro-batches", type=int, default=2, help="of the disaggregated layouts")
    parser.add_argument(
        "--draft", default="", help="colocated with each of these METHOD:N too, comma-separated"
    )
    parser.add_argument("--save", action="store_true", help="keep the judged rows in bench/results")
    given = parser.parse_args(arguments)
    if given.rounds:
        batches = tuple(int(batch) for batch in given.batch.split(","))
        case = Case(given.model, batches, PROMPT, given.output_len, given.turns, isa=given.isa)
        drafts, grid = tuple(filter(None, given.draft.split(","))), replace(SHORT, isa=given.isa)
        append_rounds(given.record, given.rounds, case, given.micro_batches, cores(), grid, drafts)
    record = read_record(given.record)
    print(f"{'':<34}{'TPOT ms':>10}{'planned':>10}{'error':>9}{'tok/s':>10}{'planned':>10}{'error':>9}")
    rows = judged_all(given.model, record, cores())
    for row in rows:
        show(row)
    totals = summaries(rows)
    for one in totals:
        print(
            f"{one['case']}, absolute errors: TPOT {one['tpot_error']:.1%}, throughput {one['tok_s_error']:.1%}"
        )
    if given.save:
        known = {"model": Path(given.model).name, "rounds": len(record.rounds), **origin(given.isa)}
        path = RESULTS / "planner_self.jsonl"
        kept = [line for line in path.read_text().splitlines() if _of(json.loads(line)) != _of(known)]
        found = [json.dumps(row | known) for row in [*rows, *totals]]
        path.write_text("".join(line + "\n" for line in [*kept, *found]))


if __name__ == "__main__":
    main()
