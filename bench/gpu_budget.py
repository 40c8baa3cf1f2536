"""The compile budget: what each kernel may take of the chip, by Triton version, chip and case (`gpu_budget.jsonl`).

A kernel without a row keeps the general rules: no spilled register, no local load inside a loop, shared memory of at
most 227 KB. A row states what is allowed beyond them and what has to be reached: registers of a thread, programs of a
multiprocessor, 128-bit loads' share of loads and of bytes, matrix instructions, instructions of a loop. Rows without
`wide_bytes` are older: there a barrier of copies counted as a narrow load. It knows no times: nothing here ran.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from bench.gpu_runner import Row, Step, run_step
from bench.origin import ROOT
from bench.rows import table

FILE = Path(__file__).with_name("gpu_budget.jsonl")
KEPT = (
    "registers", "spill", "local_in_loops", "shared", "programs", "wide_loads", "wide_bytes", "matrix", "loop",
)  # fmt: skip
SHARED = 227 << 10
LONGER = 1.1  # times the instructions that a loop had
SECONDS = 1800.0
Key = tuple[str, int, str, str]


def compile_all(archs: list[int], triton: Path | None, as_json: bool, write: bool) -> int:
    """Compile all launches for each chip in as many processes as there are cores. Exit status 1 where something did not
    compile or is beyond the budget. `triton`: a folder whose Triton compiles, put before the installed one."""
    path = os.pathsep.join(str(p) for p in (triton, ROOT) if p)
    environment = {**os.environ, "PYTHONPATH": path}
    found: list[Row] = []

    def told(row: Row) -> None:
        found.append(row)
        if as_json:
            print(json.dumps(row), flush=True)

    status = 0
    for arch in archs:
        command = ("-m", "bench.gpu_compile", str(arch), "--jobs", str(os.cpu_count() or 1))
        ended = run_step(Step(f"sm_{arch}", command, SECONDS), SECONDS, told, environment)
        if ended["status"]:
            status = 1
            print(f"sm_{arch}: {ended}", file=sys.stderr)
    if write:
        write_budget(found)
    beyond = [line for row in found for line in faults(row, budget())]
    print(*beyond or ["every kernel within its budget"], sep="\n", file=sys.stderr)
    return int(bool(status or beyond))


def budget(file: Path = FILE) -> dict[Key, Row]:
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {_key(row): row for row in rows}


def write_budget(found: Iterable[Row], file: Path = FILE) -> None:
    """Rows that were found take the places of those of the same Triton, chip, case and kernel."""
    rows = budget(file) | {_key(row): _kept(row) for row in found if "error" not in row}
    file.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)), encoding="utf-8")


def section() -> str:
    """What the budget holds, for bench/RESULTS.md: kernels by Triton and chip, and each that spills."""
    rows = list(budget().values())
    lines = []
    for triton, arch in sorted({(str(row["triton"]), int(_number(row, "arch"))) for row in rows}):
        own = [row for row in rows if (row["triton"], row["arch"]) == (triton, arch)]
        spilling = [row for row in own if row["spill"]]
        told = [f"{row['case']} {row['kernel']} {row['spill']}" for row in spilling]
        figures = len({str(row["case"]) for row in own}), len(own), "; ".join(told) or "none"
        loops = sum(bool(row["local_in_loops"]) for row in own)
        most = max(_number(row, "shared") for row in own)
        lines.append([triton, f"sm_{arch}", *figures, loops, f"{most / 1024:g} of {SHARED >> 10}"])
    head = [
        "Triton",
        "chip",
        "launches",
        "kernels",
        "spilled, bytes of a thread",
        "local loads in loops",
        "shared KB",
    ]
    return (
        "**Compiled, not run**: `python -m bench.gpu_first_run --compile-only --json`, with `--triton FOLDER` for "
        "another Triton than the pinned one. Launches are those of the Triton backend at sizes of served models. One "
        "that compiles to what an earlier one of its group did is not counted.\n\n"
    ) + table(head, lines)


def faults(row: Row, known: Mapping[Key, Row]) -> list[str]:
    """What a kernel takes beyond its budget, a line for each."""
    where = f"sm_{row['arch']} Triton {row['triton']} {row['case']}"
    if "error" in row:
        return [f"{where}: {row['error']}"]
    where += f" {row['kernel']}"
    held = known.get(_key(row), {"spill": 0, "local_in_loops": 0})
    most: list[tuple[str, float]] = [
        (name, _number(held, name)) for name in ("registers", "spill", "local_in_loops") if name in held
    ]
    most.append(("shared", float(SHARED)))
    least = [(name, _number(held, name)) for name in ("programs", "wide_loads", "wide_bytes") if name in held]
    if "loop" in held:
        most.append(("loop", LONGER * _number(held, "loop")))
    lines = [
        f"{where}: {name} {row[name]}, at most {limit:g}"
        for name, limit in most
        if _number(row, name) > limit
    ]
    lines += [
        f"{where}: {name} {row[name]}, at least {limit:g}"
        for name, limit in least
        if _number(row, name) < limit
    ]
    missing = [name for name in _names(held) if name not in _names(row)]
    return lines + [f"{where}: no {name}" for name in missing]


def _key(row: Row) -> Key:
    arch = row["arch"]
    assert isinstance(arch, int)
    return str(row["triton"]), arch, str(row["case"]), str(row["kernel"])


def _kept(row: Row) -> Row:
    return {name: row[name] for name in ("triton", "arch", "case", "kernel", *KEPT)}


def _number(row: Row, name: str) -> float:
    found = row[name]
    assert isinstance(found, int | float)
    return float(found)


def _names(row: Row) -> tuple[str, ...]:
    found = row.get("matrix", ())
    assert isinstance(found, list | tuple)
    return tuple(found)
