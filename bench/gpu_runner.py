"""Steps of a run, each a process with a deadline: what it prints as JSON lines are rows, told as they come.

It knows no step and no GPU. A process that is given up ends with all that it started.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from bench.origin import ROOT

Row = dict[str, object]
GIVEN_UP = 124
LEAST = 2.0  # seconds: with less than that no step begins
TAIL = 15  # lines of a step that failed


@dataclass(frozen=True, slots=True)
class Step:
    """`command` goes behind the interpreter. It takes at most `seconds`. `needs` is a program without which the step is
    skipped; `under` is put before the interpreter."""

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: str = ""
    under: tuple[str, ...] = ()


def run_steps(
    steps: Iterable[Step], seconds: float, write: Callable[[Row], None], environment: Mapping[str, str]
) -> list[Row]:
    """All rows: those that the steps printed, and one for each step with its `status`: 0, the exit status, 124 where it
    was given up, "skipped" or "not begun"."""
    end = time.monotonic() + seconds
    found: list[Row] = []

    def told(row: Row) -> None:
        found.append(row)
        write(row)

    for step in steps:
        left = min(step.seconds, end - time.monotonic())
        if step.needs and shutil.which(step.needs) is None:
            told({"step": step.name, "status": "skipped", "reason": f"no {step.needs} on this machine"})
        elif left < LEAST:
            told({"step": step.name, "status": "not begun", "reason": "no time was left"})
        else:
            told(run_step(step, left, told, environment))
    return found


def run_step(step: Step, seconds: float, told: Callable[[Row], None], environment: Mapping[str, str]) -> Row:
    """The row of the step itself; those that it prints are told before."""
    begin, tail = time.monotonic(), deque[str](maxlen=TAIL)
    process = subprocess.Popen(
        [*step.under, sys.executable, *step.command], cwd=ROOT, env=dict(environment), text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    given_up = threading.Event()

    def give_up() -> None:
        given_up.set()
        _end(process)

    timer = threading.Timer(seconds, give_up)
    timer.start()
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            row = _row(line)
            if row is None:
                tail.append(line.rstrip())
            else:
                told({"step": step.name} | row)
    status = process.wait()  # its output has ended, and the timer still runs
    timer.cancel()
    _end(process)
    status = GIVEN_UP if given_up.is_set() else status
    ended: Row = {"step": step.name, "status": status, "seconds": round(time.monotonic() - begin, 1)}
    return ended | ({"tail": list(tail)} if status else {})


def _end(process: subprocess.Popen[str]) -> None:
    """The process and all that it started, which are a session of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of them have ended


def _row(line: str) -> Row | None:
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
