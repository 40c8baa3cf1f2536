"""How the end of a process reads: its exit code in words, and the last lines of its log. It knows no process."""

import os
import signal
from pathlib import Path

_TAIL_BYTES = 8192
_TAIL_LINES = 6


def ended_with(code: int | None) -> str:
    """An exit code, a negative signal, or None where nobody was told."""
    if code is None:
        return "its process ended"
    if code >= 0:
        return f"its process ended with exit code {code}"
    number = -code
    hint = "; out of memory?" if number == signal.SIGKILL else ""
    return f"its process was killed by {signal.Signals(number).name}{hint}"


def last_lines(path: Path) -> str:
    """Of a log, indented; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
