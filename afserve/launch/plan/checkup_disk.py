"""How a folder of KV blocks is read fastest, measured for `doctor --io`; DeepSpeed's asynchronous I/O is built for that
where its extra is installed. Nothing else ever builds it.

What belongs to the engine is imported here only when it is asked for: a missing torch is a finding of the check-up.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from afserve.launch.plan.machine import this_machine

OK, NOTE, BAD = "ok", "note", "missing"
_NAME = "DeepSpeed's asynchronous I/O"
_JOB_BYTES, _MOST_JOBS = 2 << 30, 8  # what a compiler takes with torch's headers, and compilers at once


@dataclass(frozen=True, slots=True)
class Finding:
    """`level` is ok, note (works without, slower or less) or missing (does not work); `advice` how to get it."""

    what: str
    level: str
    found: str
    advice: str = ""


def deepspeed() -> Finding:
    """Whether it may be measured, and how to get it; it builds nothing."""
    from afserve.comm.disk.deepspeed_library import lacking, libraries

    if libraries() is not None:
        return Finding("disk", OK, f"{_NAME}: built; doctor --io FOLDER measures whether it is faster there")
    if wanted := lacking():
        return Finding("disk", NOTE, f"{_NAME}: not usable; threads read --kv-ssd", wanted)
    return Finding(
        "disk", NOTE, f"{_NAME}: not built; threads read --kv-ssd", "afserve doctor --io FOLDER builds it"
    )


def disk(folder: Path, tell: Callable[[str], None]) -> Iterator[Finding]:
    """Measures how fast a folder for KV is read, and leaves there what was fastest. `tell` gets a line while that takes
    long. Raises ConfigError."""
    from afserve.comm.disk.ways import DEEPSPEED_WAYS, WAYS, fastest, measure, save

    yield (built := _built(tell))
    reasons: list[str] = []
    ways = (*WAYS, *DEEPSPEED_WAYS) if built.level == OK else WAYS
    found = sorted(measure(folder, ways=ways, tell=reasons.append), key=lambda one: -one.rate)
    best = fastest(found)
    save(folder, best)
    for reason in dict.fromkeys(reasons):
        yield Finding("disk", NOTE, f"{_NAME} was not measured: {reason}")
    for one in found:
        yield Finding(
            "disk",
            OK,
            f"{one.rate / 1e9:5.2f} GB/s by {one.way}, {one.cost * 1e9:.2f} s of a core for each GB",
        )
    yield Finding("disk", OK, f"--kv-ssd {folder} is read by {best.way} from the next start on")


def _built(tell: Callable[[str], None]) -> Finding:
    """It is there, or is built now, or why not."""
    from afserve.comm.disk.deepspeed_library import build, lacking, libraries

    if libraries() is not None:
        return Finding("disk", OK, f"{_NAME}: built")
    if wanted := lacking():
        return Finding("disk", NOTE, f"{_NAME}: not measured, threads are", wanted)
    machine = this_machine()
    jobs = max(1, min(machine.cores, machine.memory // _JOB_BYTES, _MOST_JOBS))
    if why := build(jobs, tell):
        return Finding("disk", NOTE, f"{_NAME}: not measured, threads are", why)
    return Finding("disk", OK, f"{_NAME}: built now")
