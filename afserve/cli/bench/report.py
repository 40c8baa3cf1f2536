"""Where a row was measured, and when: what each one of `afserve bench` says."""

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import afserve
from afserve.launch.plan.processors import processor_name


def measured_here(cores: int | None) -> dict[str, object]:
    """Where and when a row was measured, and what else ran: as every row carries it."""
    return {
        "machine": f"{processor_name()}, {cores} cores",
        "load": round(os.getloadavg()[0], 1),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
    }


def commit() -> str:
    """Of the checkout that runs, "-dirty" if it was changed; the version where there is no checkout."""
    folder = Path(afserve.__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],  # noqa: S607  whichever git the user has
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return afserve.__version__
    return found.stdout.strip()
