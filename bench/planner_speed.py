"""How long the planner's commands take: each in fresh interpreters, CPU and wall seconds, beside the machine's load.

`python -m bench.planner --speed` writes these rows alone. Modules are compiled once before, as `pip install` leaves
them. The simulation of 504 + 456 devices is also held against the closed form of the same plan.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
_TWO_KINDS = "plan --model deepseek-v3 --pool h800=512 --pool h20=512 --tpot 50ms --json"
_LAYOUT = "--attention-devices 504 --expert-devices 456 --kind afd"


@dataclass(frozen=True, slots=True)
class Timed:
    """A command and the CPU seconds that it may take."""

    case: str
    line: str
    limit: float
    repeats: int = 7


COMMANDS = (
    Timed("afserve plan --help", "plan --help", 0.5),
    Timed("two pools of 512, DeepSeek-V3", _TWO_KINDS, 1.0),
    Timed(
        "two pools of 512, DeepSeek-V3, prompts, three pools",
        f"{_TWO_KINDS} --ttft 4s --input 2000 --output 500",
        1.0,
    ),
    Timed(
        "simulate 504 + 456 devices, DeepSeek-V3",
        f"simulate --model deepseek-v3 --pool h800=512 --pool h20=512 --tpot 50ms {_LAYOUT} --json",
        15.0,
        3,
    ),
)
_MOST_APART = 0.03  # of the simulation from the closed form


def speeds() -> list[dict[str, object]]:
    with TemporaryDirectory() as compiled:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return [timing(command, {**kept, "PYTHONPYCACHEPREFIX": compiled}) for command in COMMANDS]


def timing(command: Timed, environment: Mapping[str, str]) -> dict[str, object]:
    """Medians of fresh interpreters."""
    wall, cpu, printed = [], [], ""
    code = f"from afserve.cli.main import run; raise SystemExit(run({command.line.split()!r}))"
    for turn in range(1 + command.repeats):
        used, begun = _children(), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        if turn:
            wall.append(time.perf_counter() - begun)
            cpu.append(_children() - used)
        printed = done.stdout
    row: dict[str, object] = {
        "claim": "speed",
        "case": command.case,
        "median_s": round(statistics.median(wall), 3),
        "least_s": round(min(wall), 3),
        "most_s": round(max(wall), 3),
        "cpu_s": round(statistics.median(cpu), 3),
        "load": round(os.getloadavg()[0], 1),
        "limit": command.limit,
        "passed": statistics.median(cpu) <= command.limit,
    }
    if command.line.startswith("simulate"):
        apart = float(json.loads(printed)["difference"])
        row |= {"difference": apart, "passed": bool(row["passed"]) and abs(apart) <= _MOST_APART}
    return row


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def replace_rows(path: Path, found: list[dict[str, object]], mark: dict[str, str]) -> list[dict[str, object]]:
    """Puts the rows in the place of earlier ones of their claims."""
    claims = {row["claim"] for row in found}
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["claim"] not in claims]
    path.write_text("".join(line + "\n" for line in [*kept, *(json.dumps(row | mark) for row in found)]))
    return found
