"""Where a measured row comes from: machine, how busy it was, commit, date. Every row of bench/results carries it."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from afserve.config import AUTO
from afserve.kernels.isa import used_isa

ROOT = Path(__file__).resolve().parent.parent


def origin(isa: str = AUTO) -> dict[str, object]:
    """`isa`: the instruction set that was asked for; auto is the best one of this machine."""
    return {
        "machine": machine(),
        "isa": used_isa(isa),
        "load": round(os.getloadavg()[0], 2),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def machine() -> str:
    """The processor as the system names it, and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        name = names[0] if names else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """Short hash, with -dirty when tracked files differ; empty outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
