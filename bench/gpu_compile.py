"""`python -m bench.gpu_compile ARCH`: every launch compiled for a chip that need not be here; one JSON line per kernel.

python -m bench.gpu_compile 90                       all groups, one after another, in this process
python -m bench.gpu_compile 100 --only mla-64        of one group
python -m bench.gpu_compile here --jobs 16           for the GPU that is here, a process for each group; Triton's cache
                                                     keeps what was compiled, so that nothing after it waits

Triton at hand compiles; ptxas and cuobjdump come with its wheel. Lines are printed as they come. A case that does not
compile has an `error` in the place of its figures, and the next one is compiled.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import triton

from afserve.kernels.devices.cuda import chip_of, numbered
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.tiles import TileTable
from bench.gpu_chip import SHARED, Made, compile_only, row
from bench.gpu_launches import groups

H200_MULTIPROCESSORS = 132
SECONDS = 1500.0  # the most that a group may take where eight cores are busy with others
FAILURES = (RuntimeError, ValueError, AssertionError, OSError, LookupError, TypeError, AttributeError)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_compile", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "arch", choices=("here", *map(str, sorted(SHARED))), help="compute capability, 90 is 9.0"
    )
    parser.add_argument("--only", action="append", metavar="GROUP", help="one group; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="so many processes at once, each with one group")
    options = parser.parse_args(arguments)
    arch = _here() if options.arch == "here" else int(options.arch)
    return (
        compile_all(arch, options.only)
        if options.jobs == 1
        else _side_by_side(arch, options.only, options.jobs)
    )


def _here() -> int:
    major, minor = chip_of(numbered(torch.device("cuda"))).capability
    return 10 * major + minor


def _side_by_side(arch: int, only: list[str] | None, jobs: int) -> int:
    """A process for each group; the lines of one are printed when it ends."""
    with ThreadPoolExecutor(jobs) as pool:
        return max(pool.map(partial(_group, arch), only or list(groups(_ops(arch)))))


def _group(arch: int, group: str) -> int:
    command = [sys.executable, "-m", "bench.gpu_compile", str(arch), "--only", group]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        printed, status, last = done.stdout, done.returncode, done.stderr.strip()[-300:]
    except subprocess.TimeoutExpired as expired:
        printed, status, last = _text(expired.stdout), 1, f"given up after {SECONDS:g} seconds"
    if status and '"error"' not in printed:
        error = {
            "case": group,
            "error": last or f"exit status {status}",
            "arch": arch,
            "triton": triton.__version__,
        }
        printed += json.dumps(error) + "\n"
    print(printed, end="", flush=True)
    return int(status != 0)


def _text(printed: bytes | str | None) -> str:
    """Whole lines of what a process had printed when it was given up."""
    text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed or ""
    return text[: text.rfind("\n") + 1]


def _ops(arch: int) -> TritonBackend:
    tiles = TileTable(SHARED[arch], tensor_memory=arch // 10 == 10)
    return TritonBackend(torch.device("cpu"), H200_MULTIPROCESSORS, tiles, arch >= 89)


def compile_all(arch: int, only: list[str] | None) -> int:
    """Exit status 1 when a case did not compile."""
    known = {"arch": arch, "triton": triton.__version__}
    failed = 0

    def told(made: Made) -> None:
        print(json.dumps(row(made) | known), flush=True)

    launches = compile_only(arch, told)
    planned = groups(_ops(arch))
    for group in only or planned:
        launches.begin_group()
        for case, call in planned[group]():
            launches.case = case
            try:
                call()
            except (*FAILURES, triton.TritonError) as error:
                failed = 1
                print(
                    json.dumps({"case": case, "error": f"{type(error).__name__}: {error}"[:300]} | known),
                    flush=True,
                )
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
