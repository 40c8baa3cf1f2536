"""`python -m bench.gpu_first_run`: half an hour on a machine with a GPU, in the order in which things can be wrong.

python -m bench.gpu_first_run --prepare             wheels for that machine into .cache/first_run, on one with a network
python -m bench.gpu_first_run --compile-only        every kernel compiled and compared with its budget, without a GPU
python -m bench.gpu_first_run                       all steps; rows in bench/results/gpu_first_run.jsonl
python -m bench.gpu_first_run --only tokens-1x1     some of them
python -m bench.gpu_first_run --device cpu          the steps that need no GPU: does the program itself run?

Each step is a process with a deadline, and each row is written when it is printed: a crash, a hang or the end of the
time costs one step. Tokens of topologies are compared by how near the other token was, and no comparison stops what
follows. Without a GPU it says "not measured" and ends with 0. Exit status 1 where a step failed or tokens are others.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from afserve.kernels.devices import cuda
from bench.gpu_compare import verdicts
from bench.gpu_plan import steps
from bench.gpu_runner import Row, run_steps
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "gpu_first_run.jsonl"
WHEELS = ROOT / ".cache" / "first_run"
MINUTES = 28.0


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.prepare:
        from bench.gpu_prepare import prepare

        return prepare(WHEELS)
    if options.compile_only:
        from bench.gpu_budget import compile_all

        return compile_all(options.arch or [90, 100], options.triton, options.json, options.write_budget)
    on_gpu = options.device != "cpu"
    if on_gpu and not cuda.count_gpus():
        print("not measured: no CUDA device")
        return 0
    return first_run(options.out, options.minutes, options.device, options.only)


def first_run(out: Path, minutes: float, device: str, only: list[str] | None = None) -> int:
    on_gpu = device != "cpu"
    planned = [step for step in steps(device, WHEELS, minutes / MINUTES) if not only or step.name in only]
    known = origin() | {"gpu": cuda.chip_of(torch.device(device)).name if on_gpu else "none"}

    def write(row: Row) -> None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | known) + "\n")
        print(_line(row), flush=True)

    found = run_steps(planned, 60 * minutes, write, _environment())
    judged = verdicts(found)
    for row in judged:
        write(row)
    failed = any(row.get("status") not in (0, "skipped", None) for row in found)
    return int(failed or any(row["verdict"] == "others" for row in judged))


def _environment() -> dict[str, str]:
    """This one's, with what `--prepare` gathered and the first step unpacked in front."""
    paths = [str(ROOT), str(WHEELS / "site"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _line(row: Row) -> str:
    """A row on a line: its step, then what is short in it; of a step that failed, what it printed last."""
    shown = {k: v for k, v in row.items() if k not in ("step", "tail") and len(str(v)) < 100}
    line = f"{row['step']:14} {json.dumps(shown)}"
    tail = row.get("tail")
    return line if not isinstance(tail, list) or not tail else "\n    ".join([line, *map(str, tail)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_first_run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=OUT, help="rows are appended here")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the most that all of it may take")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu for the steps that need no GPU")
    parser.add_argument("--only", action="append", metavar="STEP", help="one step; may be repeated")
    parser.add_argument("--prepare", action="store_true", help="gather wheels, run nothing")
    parser.add_argument("--compile-only", action="store_true", help="compile every kernel, run nothing")
    parser.add_argument(
        "--arch", action="append", type=int, choices=(80, 89, 90, 100), help="90 and 100 unless given"
    )
    parser.add_argument(
        "--triton", type=Path, metavar="FOLDER", help="another Triton than the installed one compiles"
    )
    parser.add_argument("--json", action="store_true", help="with --compile-only: one JSON line per kernel")
    parser.add_argument(
        "--write-budget", action="store_true", help="with --compile-only: what was found is the budget"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
