"""`python -m bench.gpu_first_run`: ten minutes on a machine with a GPU, in the order in which things can be wrong.

1. the Triton op tests on the device                       (`tests/kernels/triton`)
2. the same greedy tokens colocated, 1x1 and 1x2, all nodes on one device, and every transport that reaches it
3. rows of the kernels, then of the engine                 (bench/results/gpu_first_run.jsonl)

Each stage is a process with a deadline, so a crash or a hang costs one stage. A stage that fails is named and the next
runs, but without equal tokens nothing is measured. Elsewhere it says "not measured" and ends with 0.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "gpu_first_run.jsonl"
MINUTES = 9.5
TOPOLOGIES = ("colocated", "1x1", "1x2")
Launch = Callable[
    [Sequence[str], float], tuple[int, str]
]  # arguments of python -m, seconds -> status, what it printed


@dataclass(frozen=True, slots=True)
class Stage:
    """`share` of the whole time is the most it may take; what earlier ones left over is everybody's."""

    name: str
    share: float


TESTS, TOKENS, KERNELS, ENGINE = (
    Stage("tests", 0.3),
    Stage("tokens", 0.2),
    Stage("kernels", 0.25),
    Stage("engine", 0.25),
)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("not measured: no CUDA device")
        return 0
    from bench.cuda_all import run_tests  # kernels: not before a device is known to be there

    return first_run(options.out, options.minutes, launch, run_tests)


def first_run(
    out: Path, minutes: float, start: Launch, tests: Callable[[float], list[dict[str, object]]]
) -> int:
    """Exit status 0 when every test passed, all tokens are the same and every row was measured."""
    begin = time.monotonic()

    def left(stage: Stage) -> float:
        """Seconds for a stage: its share, or all that is left when that is less."""
        return max(0.0, min(60 * minutes * stage.share, begin + 60 * minutes - time.monotonic()))

    found = tests(left(TESTS))
    bad = [str(row["file"]) for row in found if row["status"]]
    print(
        f"tests: {len(found) - len(bad)} of {len(found)} files pass{': not ' + ', '.join(bad) if bad else ''}"
    )
    tokens = {name: _tokens(start, name, left(TOKENS) / len(TOPOLOGIES)) for name in TOPOLOGIES}
    alike = tokens[TOPOLOGIES[0]] is not None and len({json.dumps(t) for t in tokens.values()}) == 1
    for name, got in tokens.items():
        print(
            f"tokens {name}: {'none' if got is None else 'the same' if got == tokens[TOPOLOGIES[0]] else 'others'}"
        )
    if not alike:
        print("not measured: the topologies do not give the same tokens")
        return 1
    kernels, _ = start(("bench.kernels_cuda", "--failures"), left(KERNELS))
    rows = _engine_rows(start, left(ENGINE))
    with out.open("a") as file:
        file.writelines(
            json.dumps({**row, **origin(), "gpu": torch.cuda.get_device_name()}) + "\n" for row in rows
        )
    for row in rows:
        print(f"{row['engine']} batch {row['batch']}: {row['tokens_per_second']:,.0f} tokens/s")
    return int(bool(bad) or kernels != 0 or not rows)


def _tokens(start: Launch, topology: str, seconds: float) -> list[list[int]] | None:
    """None when the stage failed; what it printed last is shown."""
    status, printed = start(("bench.gpu_stages", "tokens", topology), seconds)
    if status:
        print(*printed.splitlines()[-15:], sep="\n")
        return None
    found: list[list[int]] = json.loads(printed.splitlines()[-1])
    return found


def _engine_rows(start: Launch, seconds: float) -> list[dict[str, object]]:
    rows = []
    for topology in TOPOLOGIES:
        status, printed = start(("bench.gpu_stages", "engine", topology), seconds / len(TOPOLOGIES))
        if status:
            print(f"engine {topology} failed:", *printed.splitlines()[-15:], sep="\n")
        else:
            rows += [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return rows


def launch(arguments: Sequence[str], seconds: float) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", *arguments]
        try:
            status = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
        log.seek(0)
        return status, log.read()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_first_run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=OUT, help="rows are appended here")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the most that all of it may take")
    return parser


if __name__ == "__main__":
    sys.exit(main())
