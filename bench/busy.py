"""Endless loops beside a measurement: what an overloaded host is made of."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that never wait, at the same priority; they end with the block, and with this process."""
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
