"""Round trips between attention and expert nodes: our transports, gloo, Unix sockets and a plain memcpy in one run.

python -m bench.m2n --quick --json                 one object a line, within 40 s
python -m bench.m2n --save                         all sizes and shapes, some minutes; rows are kept in bench/results
python -m bench.m2n --busy --save                  the same with every core taken by something else
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from bench.m2n_wires import ONE_PAIR, WIRES, Case, Side
from bench.origin import ROOT, origin

FORK = multiprocessing.get_context("fork")
KIB = 1024
SIZES = tuple(KIB * n for n in (2, 8, 32, 128, 256, 1024, 2048, 8192))  # of one pair
QUICK_SIZES = tuple(KIB * n for n in (2, 128, 256, 1024))
SHAPES = {  # A x F: sizes
    (1, 4): (2, 128, 1024),
    (4, 1): (2, 128, 1024),
    (2, 2): (2, 128, 1024, 8192),
    (2, 3): (2, 128, 1024),
    (3, 2): (128,),
    (4, 4): (2, 128, 1024),
}
QUICK_SHAPES = {(2, 3): (128,)}
SECONDS, QUICK_SECONDS = 0.8, 0.25  # of one measurement, about
MOST, LEAST = 4000, 40  # rounds
# About what a round trip takes: microseconds for each pair, bytes per microsecond. Only to choose the number of rounds.
PACE = {"shm": (30, 5000), "unix": (60, 2000), "memcpy": (2, 10000), "memcpy_cold": (2, 5000)}
SLOW_PACE = (400, 500)
BUSY_MICROSECONDS = 4000  # more, where every core is taken
LONGEST = 60.0  # seconds that one measurement may take
QUICK_ALL = 40.0  # seconds that all of a quick run may take; what is left then is not measured
IDLE_SECONDS = 1.0


def rounds(case: Case, quick: bool, busy: bool) -> int:
    """As many as fit the time, so that slow wires do not hold up the others."""
    fixed, speed = PACE.get(case.wire, SLOW_PACE)
    pairs = case.attention * case.experts
    took = pairs * (fixed + 2 * case.bytes / speed) + (BUSY_MICROSECONDS if busy else 0)
    return max(LEAST, min(MOST, int((QUICK_SECONDS if quick else SECONDS) * 1e6 / took)))


def run_side(side: Side, rank: int, case: Case, meet: Barrier, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send((side(rank, case, meet), time.process_time()))


class TooLong(Exception):
    """A measurement took longer than it may."""


def measure(case: Case, limit: float = LONGEST) -> list[float]:
    """Seconds of every round trip of every attention node, sorted. Raises TooLong after `limit` seconds."""
    until = time.monotonic() + limit
    attention, expert = WIRES[case.wire]
    meet = FORK.Barrier(case.attention + case.experts)
    jobs = [(attention, a) for a in range(case.attention)] + [(expert, f) for f in range(case.experts)]
    running = []
    for side, rank in jobs:
        mine, theirs = FORK.Pipe()
        process = FORK.Process(target=run_side, args=(side, rank, case, meet, theirs), daemon=True)
        process.start()
        theirs.close()
        running.append((process, mine))
    found: list[float] = []
    try:
        for _, mine in running:
            if not mine.poll(max(0.0, until - time.monotonic())):
                raise TooLong(f"it took longer than {limit:.1f} s")
            found += mine.recv()[0][case.warm :]
    finally:
        for process, mine in running:
            process.join(1.0 if len(found) else 0.0)
            process.kill()
            process.join()
            mine.close()
    return sorted(found)


def burn() -> None:
    while True:
        pass


def row(case: Case, seconds: list[float], busy: bool) -> dict[str, object]:
    """gb_s counts what one attention node sends and gets back, over the median."""
    at = {
        name: seconds[min(len(seconds) - 1, int(share * len(seconds)))] for name, share in QUANTILES.items()
    }
    moved = 2 * case.bytes * (case.experts if not case.wire.startswith("memcpy") else 1)
    return {
        "transport": case.wire,
        "bytes": case.bytes,
        "pairs": f"{case.attention}x{case.experts}",
        "p50_us": round(at["p50"] * 1e6, 1),
        "p99_us": round(at["p99"] * 1e6, 1),
        "p99_9_us": round(at["p99.9"] * 1e6, 1),
        "gb_s": round(moved / at["p50"] / 1e9, 3),
        "rounds": len(seconds),
        "cores": "busy" if busy else "quiet",
    }


QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


def cases(quick: bool, busy: bool, wires: list[str]) -> Iterator[Case]:
    for size in QUICK_SIZES if quick else SIZES:
        yield from (planned(Case(wire, size, 1, 1, 0, 0, ""), quick, busy) for wire in wires)
    for (attention, experts), sizes in (QUICK_SHAPES if quick else SHAPES).items():
        for size in sizes:
            for wire in wires:
                if wire not in ONE_PAIR:
                    yield planned(Case(wire, size * KIB, attention, experts, 0, 0, ""), quick, busy)


def planned(case: Case, quick: bool, busy: bool) -> Case:
    count = rounds(case, quick, busy)
    return replace(case, rounds=count, warm=count // 10)


def idle_row(busy: bool) -> dict[str, object]:
    """Processor time of an expert node that waits for a second and gets nothing."""
    mine, theirs = FORK.Pipe()

    def wait() -> None:
        from afserve.comm.transport import Layout, WireType
        from afserve.comm.transports import connect

        rows = Layout(24, 3, 6, 2, 4, 5, WireType.FLOAT32, WireType.FLOAT32)

        end, _ = connect.listen("shm", expert=0, attention_nodes=2, layout=rows)
        before = time.process_time()
        end.wait(end.boxes(), IDLE_SECONDS)
        theirs.send(time.process_time() - before)

    process = FORK.Process(target=wait, daemon=True)
    process.start()
    used = mine.recv()
    process.join()
    return {
        "transport": "shm",
        "idle_cpu_percent": round(100 * used / IDLE_SECONDS, 2),
        "cores": "busy" if busy else "quiet",
    }


def measured(case: Case, limit: float, busy: bool) -> dict[str, object]:
    """A row, or one that says why there is none."""
    try:
        if limit <= 0:
            raise TooLong(f"the {QUICK_ALL:g} s of a quick run are over")
        return row(case, measure(case, limit), busy)
    except TooLong as why:
        pairs = f"{case.attention}x{case.experts}"
        return {"transport": case.wire, "bytes": case.bytes, "pairs": pairs, "not_measured": str(why)}


def rows(quick: bool, busy: bool, wires: list[str]) -> Iterator[dict[str, object]]:
    burners = [
        FORK.Process(target=burn, daemon=True) for _ in range(len(os.sched_getaffinity(0)) if busy else 0)
    ]
    for burner in burners:
        burner.start()
    try:
        until = time.monotonic() + (QUICK_ALL if quick else float("inf"))
        for case in cases(quick, busy, wires):
            limit = min(LONGEST, until - time.monotonic())
            with tempfile.TemporaryDirectory() as folder:
                yield measured(replace(case, folder=folder), limit, busy)
        yield idle_row(busy)
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.m2n", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four sizes, two topologies, within 40 s")
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    parser.add_argument("--busy", action="store_true", help="with every core taken by something else")
    parser.add_argument("--wires", default=",".join(WIRES), help="comma-separated, of: " + ", ".join(WIRES))
    parser.add_argument("--save", action="store_true", help="append to bench/results/m2n.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path, known = ROOT / "bench" / "results" / "m2n.jsonl", origin()
    for found in rows(options.quick, options.busy, options.wires.split(",")):
        print(json.dumps(found) if options.json else line(found), flush=True)
        if options.save and "not_measured" not in found:
            save(path, {**found, **known})


def line(found: dict[str, object]) -> str:
    if "idle_cpu_percent" in found:
        return f"{found['transport']:16} idle: {found['idle_cpu_percent']} % of one core"
    what = f"{found['transport']:16} {found['pairs']:4} {int(str(found['bytes'])) // KIB:6} KiB  "
    if "not_measured" in found:
        return f"{what}not measured: {found['not_measured']}"
    return (
        f"{what}p50 {found['p50_us']:>9} us  p99 {found['p99_us']:>9} us  p99.9 {found['p99_9_us']:>9} us  "
        f"{found['gb_s']:>7} GB/s"
    )


def save(path: Path, found: dict[str, object]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
