"""The expert FFN alone beside KTransformers' (kt-kernel): microseconds of a layer's routed experts, in one run.

    python -m bench.kt_kernel --kt-python PY [--shapes qwen3-30b-a3b] [--forms int4,int8,bf16] [--rows 1,8,512] [--save]

kt-kernel stays in a Python of its own (its torch differs): in a virtual environment of Python 3.11 or newer

    pip install torch numpy safetensors && pip install --no-deps kt-kernel gguf

Each engine is a process with the same weights, rows and routing (`bench.kt_kernel_worker`). They take turns, and those
that have none are stopped, so that threads which wait by looping take no core from others. kt-kernel's own caller
loops too: with as many workers as cores one worker waits for the core of the caller, and its layers take whole slices
of the system's clock (8 ms in place of 3). So it runs with `--threads` workers and with one fewer, and the faster of
the two counts. Before they are timed, what all compute is compared with float32. Ratios are by round: above 1 afserve
is faster. A form that kt-kernel cannot have at a shape is named and left out.

Forms: bf16; int8 with a scale for each output, rounded by each engine itself; int4 and mxfp4, groups of 32 with a
bfloat16 scale, the same codes for both; "int4 rows", kt-kernel's int4 with a scale for each output, beside our groups
of 32, which are more exact and an eighth larger. Gates are plain SwiGLU without biases in all shapes.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

from afserve.config import AUTO, ISAS
from bench.kt_kernel_worker import Layer
from bench.origin import origin

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "kt_kernel.jsonl"
WORKER = ROOT / "bench" / "kt_kernel_worker.py"
ANSWER_SECONDS = 900.0  # for weights to be made and rounded, or for one turn
CHECKED_ROWS = 4

SHAPES = {
    "qwen3-30b-a3b": Layer(128, 2048, 768, 8),
    "deepseek-v3": Layer(32, 7168, 2048, 8),  # of its 256 experts, which take 23 GB a layer in bf16
    "gpt-oss-20b": Layer(32, 2880, 2880, 4),
}
FORMS = {"bf16": 0.02, "int8": 0.06, "int4": 0.3, "int4 rows": 0.4, "mxfp4": 0.4}
"""And how far from float32 their outputs may be, as a share of these."""


class Side:
    """A process that has one engine. It is stopped but for while it is asked."""

    def __init__(self, command: Sequence[str], threads: int) -> None:
        self.threads = threads
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        told = self._read()
        self.name, self.isa = str(told["name"]), str(told["isa"])
        self._process.send_signal(signal.SIGSTOP)

    def ask(self, figure: str, **asked: object) -> float:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found = float(self._read()[figure])
        self._process.send_signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        """The next line of JSON; kt-kernel writes others. Raises RuntimeError where the process ends without one."""
        assert self._process.stdout is not None
        with _ended_after(self._process, ANSWER_SECONDS):
            for line in self._process.stdout:
                if line.startswith("{"):
                    return dict(json.loads(line))
        raise RuntimeError(
            f"{self._process.args!r}: ended with {self._process.wait()} or took {ANSWER_SECONDS:.0f} s"
        )


@contextmanager
def _ended_after(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    for shape in options.shapes:
        for form in options.forms:
            for row in _rows(shape, form, options):
                print(json.dumps(row) if options.json else _line(row), flush=True)
                if options.save:
                    with RESULTS.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


def _rows(shape: str, form: str, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    layer = SHAPES[shape]
    isa = "" if options.isa == AUTO else options.isa
    # -P: this folder's names would hide modules that kt-kernel imports.
    kt = [options.kt_python, "-P", str(WORKER), "kt"]
    starts = [([sys.executable, "-m", "bench.kt_kernel_worker", "ours"], options.threads)]
    starts += [(kt, workers) for workers in sorted({options.threads, max(1, options.threads - 1)})]
    with ExitStack() as stack:
        sides = []
        for command, threads in starts:
            case = [form, *map(str, (*astuple(layer), threads, max(CHECKED_ROWS, *options.rows))), isa]
            try:
                sides.append(Side([*command, *case], threads))
            except RuntimeError as refusal:
                if command is not kt:
                    raise
                print(f"{shape}, {form}: left out, kt-kernel cannot: {refusal}", file=sys.stderr)
                return
            stack.callback(sides[-1].close)
        errors = [side.ask("error", rows=CHECKED_ROWS, seed=0, check=True) for side in sides]
        for side, error in zip(sides, errors, strict=True):
            if not error <= FORMS[form]:
                raise RuntimeError(
                    f"{side.name}, {shape}, {form}: {error:.3f} away from float32, at most {FORMS[form]}"
                )
        for rows in options.rows:
            yield _row(sides, rows, options) | {
                "shape": shape, "experts": layer.experts, "hidden": layer.hidden, "inner": layer.inner,
                "top_k": layer.top_k, "form": form, "error": round(errors[0], 4), "peer_error": round(errors[-1], 4),
                **origin(options.isa),
            }  # fmt: skip


def _row(sides: Sequence[Side], rows: int, options: argparse.Namespace) -> dict[str, object]:
    """All in turn, whoever begins changes by round; microseconds of a call. The peer has the least median."""
    took: dict[Side, list[float]] = {side: [] for side in sides}
    for seed in range(options.rounds):
        for side in sides if seed % 2 == 0 else sides[::-1]:
            took[side].append(side.ask("us", rows=rows, seed=seed, seconds=options.seconds))
    peer = min(sides[1:], key=lambda side: statistics.median(took[side]))
    ours, theirs = took[sides[0]], took[peer]
    ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
    return {
        "bench": "kt_kernel", "rows": rows, "us": round(statistics.median(ours), 1), "low": round(min(ours), 1),
        "high": round(max(ours), 1), "peer": peer.name, "peer_isa": peer.isa, "peer_threads": peer.threads,
        "peer_us": round(statistics.median(theirs), 1), "peer_low": round(min(theirs), 1),
        "peer_high": round(max(theirs), 1), "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(min(ratios), 3), "ratio_high": round(max(ratios), 3), "rounds": options.rounds,
        "threads": options.threads,
    }  # fmt: skip


def _line(row: dict[str, object]) -> str:
    both = f"{row['us']:>10} us  {row['peer']}, {row['peer_threads']} workers {row['peer_us']:>10} us"
    spread = f"{row['ratio_low']} to {row['ratio_high']}"
    return (
        f"{row['shape']:<14} {row['form']:<9} rows {row['rows']:>3}  {both}  ratio {row['ratio']} ({spread})"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kt_kernel", description=__doc__.splitlines()[0])
    parser.add_argument("--kt-python", required=True, help="an interpreter that has kt-kernel")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of a layer's experts")
    parser.add_argument("--forms", default=",".join(FORMS), help="in which weights are kept")
    parser.add_argument("--rows", default="1,2,4,8,32,128,512", help="that come together, 1 to 4096")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument(
        "--isa", default=AUTO, choices=(AUTO, *ISAS), help="of afserve; kt-kernel takes its best"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each turn, at least")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help=f"append the rows to {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    for name, known in (("shapes", SHAPES), ("forms", FORMS)):
        asked = getattr(options, name).split(",")
        if unknown := [each for each in asked if each not in known]:
            parser.error(f"--{name}: {unknown[0]!r} is none of {', '.join(known)}")
        setattr(options, name, asked)
    rows = options.rows.split(",")
    if not all(each.isdecimal() and 1 <= int(each) <= 4096 for each in rows):
        parser.error(f"--rows: {options.rows!r} is no list of numbers from 1 to 4096, such as 1,8,512")
    options.rows = [int(each) for each in rows]
    return options


if __name__ == "__main__":
    main()
