"""Everything on a device in one go: the Triton tests with the interpreter off, then every group of rows, then verdicts.

Each test file and each group of cases has a process of its own, so that a crash, a hang or a lost device costs one case
and not the rest. It knows no kernel.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from bench.cuda_origin import GROUPS
from bench.cuda_rows import Row, failed, verdicts
from bench.origin import ROOT

TESTS = ROOT / "tests" / "kernels" / "triton"
TEST_SHARE = 0.45  # of the time, at most
Launch = Callable[[str, int, Path, float], int]  # group, cases to skip, file of rows, seconds -> exit status


def everything(
    out: Path,
    minutes: float,
    tests: Callable[[float], list[Row]],
    launch: Launch,
    groups: tuple[str, ...] = GROUPS,
) -> int:
    """Exit status 0 when every test passed and every case has a row without an error."""
    end = time.monotonic() + 60 * minutes
    found = tests(60 * minutes * TEST_SHARE)
    for row in found:
        print(f"{row['file']:28} {row['result']}", flush=True)
    rows: list[Row] = []
    for group in groups:
        with tempfile.TemporaryDirectory() as folder:
            measured = measure_group(group, Path(folder) / "rows.jsonl", end, launch)
        rows += measured
        with out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in measured if "error" not in row)
    print(*verdicts(rows), sep="\n", flush=True)
    return int(any(row["status"] for row in found) or any("error" in row for row in rows))


def measure_group(group: str, file: Path, end: float, launch: Launch) -> list[Row]:
    """Rows of a group, over as many processes as it takes. A process that died without a row for its case gets one."""
    rows: list[Row] = []
    while (left := end - time.monotonic()) > 0:
        status = launch(group, len(rows), file, left)
        fresh = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        file.unlink(missing_ok=True)
        rows += fresh
        if status == 0:
            return rows
        if not fresh or "error" not in fresh[-1]:
            rows.append(failed(f"{group} case {len(rows)}", f"the process ended with status {status}"))
        if len(fresh) == 0 and len(rows) > 1 and "error" in rows[-2]:
            break  # two processes in a row without one row: it is not the case
    return [*rows, failed(group, "not finished in the time there was")] if time.monotonic() >= end else rows


def launch_group(group: str, skip: int, file: Path, seconds: float) -> int:
    options = ("--only", group, "--skip", str(skip), "--out", str(file), "--failures")
    command = [sys.executable, "-m", "bench.kernels_cuda", *options]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return 124


def run_tests(seconds: float, folder: Path = TESTS) -> list[Row]:
    """Every file of the Triton tests, all at once: they compile more than they run. What is slow is not run."""
    end = time.monotonic() + seconds
    logs = {path: tempfile.TemporaryFile("w+") for path in sorted(folder.glob("test_*.py"))}  # noqa: SIM115
    running = {path: _start_tests(path, log) for path, log in logs.items()}
    rows = []
    for path, process in running.items():
        try:
            status = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = 124
        logs[path].seek(0)
        lines = logs[path].read().strip().splitlines()
        logs[path].close()
        rows.append(
            {"file": path.name, "status": status, "result": lines[-1] if lines else "nothing printed"}
        )
        if status:
            print(*lines[-40:], sep="\n")
    return rows


def _start_tests(path: Path, log: IO[str]) -> subprocess.Popen[bytes]:
    """Warnings of another torch or Triton than the pinned ones are no failures of the kernels."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(path),
        "-m",
        "not slow",
        "-o",
        "filterwarnings=default",
        "-rf",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
