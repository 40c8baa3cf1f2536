"""Placement against its lower bound, against EPLB, under drift, and in time: the claims of `placement/`, measured.

    python bench/placement.py [known] [drift] [moves] [speed]      rows go to bench/results/placement.jsonl,
    tables to the screen

Loads are recorded expert counts of OLMoE-1B-7B and Mixtral-8x7B (../shared/data/routing) and, for speed, a
lognormal of the sizes named.
"""

import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from afserve.placement.balance import balance
from afserve.placement.bound import lower_bound
from afserve.placement.outcome import Balanced, Certificate
from afserve.placement.plan import Placement
from afserve.placement.problem import Floats, Ints, Nodes, Problem, scenarios
from afserve.placement.record import read_counts
from afserve.placement.split import node_load, split
from afserve.placement.standing import count_moves
from bench.eplb import eplb

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data" / "routing"
SHAPES = ((8, 64), (8, 72), (16, 80), (16, 96), (32, 96), (32, 128))
Row = dict[str, object]


def domains(model: str) -> dict[str, Floats]:
    return read_counts((DATA / f"{model}_expert_counts.json").read_text())


def ratios(slot_LNS: Ints, share_LNS: Floats, load_LE: Floats) -> Floats:
    """max/mean node load per layer."""
    load_LN = node_load(slot_LNS, share_LNS, load_LE)
    return load_LN.max(1) / load_LN.mean(1)


def levelled(slot_LNS: Ints, load_LE: Floats) -> Floats:
    """max/mean per layer when only the shares follow the load: no weights move."""
    return ratios(slot_LNS, split(slot_LNS, load_LE, np.ones(slot_LNS.shape[1])), load_LE)


def known() -> Iterator[Row]:
    """Claim 1: the gap to the bound for loads that are known."""
    for model, shapes in (("olmoe_1b7b", SHAPES), ("mixtral_8x7b", ((2, 10), (4, 12), (8, 16), *SHAPES))):
        for nodes, slots in shapes:
            ours, theirs = [], []
            for load_LE in domains(model).values():
                pool = Nodes.even(nodes, slots)
                bound = lower_bound(load_LE, pool.room().clip(max=load_LE.shape[1]), pool.pace())
                found = balance(Problem(scenarios(load_LE), pool))
                ours += list(node_load(found.slot_LNS, found.share_LNS, load_LE).max(1) / bound - 1)
                theirs += list(node_load(*eplb(load_LE, nodes, slots), load_LE).max(1) / bound - 1)
            worse = sum(bool(a > b + 1e-9) for a, b in zip(ours, theirs, strict=True))
            yield {
                "bench": "known", "model": model, "nodes": nodes, "slots": slots, "cases": len(ours),
                "gap_mean": statistics.fmean(ours), "gap_worst": max(ours),
                "eplb_gap_mean": statistics.fmean(theirs), "eplb_gap_worst": max(theirs), "worse_than_eplb": worse,
            }  # fmt: skip


def drift() -> Iterator[Row]:
    """Claim 2: placed on one, two or three domains, judged on a domain that was not among them."""
    table = domains("olmoe_1b7b")
    for nodes, slots in SHAPES:
        pool = Nodes.even(nodes, slots)
        for count in (1, 2, 3):
            found: dict[str, list[float]] = {"eplb": [], "eplb_levelled": [], "static": [], "levelled": []}
            for unseen, load_LE in table.items():
                for names in itertools.combinations([d for d in table if d != unseen], count):
                    load_CLE = scenarios([table[name] for name in names])
                    slot, share = eplb(load_CLE.mean(0), nodes, slots)
                    mine = balance(Problem(load_CLE, pool, prior=1.0))
                    found["eplb"] += list(ratios(slot, share, load_LE))
                    found["eplb_levelled"] += list(levelled(merged(slot), load_LE))
                    found["static"] += list(ratios(mine.slot_LNS, mine.share_LNS, load_LE))
                    found["levelled"] += list(levelled(mine.slot_LNS, load_LE))
            row: Row = {
                "bench": "drift",
                "nodes": nodes,
                "slots": slots,
                "seen": count,
                "cases": len(found["eplb"]),
            }
            for name, values in found.items():
                row |= {f"{name}_mean": statistics.fmean(values), f"{name}_worst": max(values)}
            yield row


def merged(slot_LNS: Ints) -> Ints:
    """EPLB's slots with second replicas on the same node taken out: one of them carries the load of both."""
    slot = slot_LNS.copy()
    for row in slot.reshape(-1, slot.shape[2]):
        seen = np.unique(row, return_index=True)[1]
        row[np.setdiff1d(np.arange(len(row)), seen)] = -1
    return slot


def as_placement(slot_LNS: Ints, load_LE: Floats) -> Placement:
    """A placement of these slots, its traffic split optimally for `load_LE`."""
    shares = split(slot_LNS, load_LE, np.ones(slot_LNS.shape[1]))
    width_LN = np.full(slot_LNS.shape[:2], slot_LNS.shape[2])
    unknown = (0.0,) * len(slot_LNS)
    return Balanced(slot_LNS, shares, width_LN, load_LE.shape[1], Certificate(unknown, unknown)).placement()


def moves() -> Iterator[Row]:
    """Claim 2, second half: the domain switches; EPLB places anew, we have a quarter of the moves that this takes."""
    table = domains("olmoe_1b7b")
    for nodes, slots in SHAPES:
        pool = Nodes.even(nodes, slots)
        for start in ("eplb", "ours"):
            ours, theirs, made, budget, worse = [], [], 0, 0, 0
            for old, new in itertools.permutations(table, 2):
                before, _ = eplb(table[old], nodes, slots)
                after, share = eplb(table[new], nodes, slots)
                quarter = int(count_moves(before, after, 64).sum()) // 4
                first = balance(Problem(scenarios(table[old]), pool))
                standing = first.placement()
                if start == "eplb":
                    standing = as_placement(merged(before), table[old])
                found = balance(Problem(scenarios(table[new]), pool, current=standing, moves=quarter))
                mine = ratios(found.slot_LNS, found.share_LNS, table[new])
                peer = ratios(after, share, table[new])
                ours += list(mine)
                theirs += list(peer)
                made, budget = made + found.certificate.moves, budget + quarter
                worse += int(mine.mean() > peer.mean() + 1e-9)
            yield {
                "bench": "moves", "nodes": nodes, "slots": slots, "start": start, "cases": len(ours),
                "budget": budget, "made": made, "mean": statistics.fmean(ours), "worst": max(ours),
                "eplb_mean": statistics.fmean(theirs), "eplb_worst": max(theirs), "switches_worse": worse,
            }  # fmt: skip


def speed() -> Iterator[Row]:
    """Claim 3: milliseconds on one core, the baseline beside it."""
    rng = np.random.default_rng(0)
    load_LE = rng.lognormal(0.0, 1.0, (58, 256))
    pool, big = Nodes.even(32, 288), Nodes.even(1024, 2048)
    load_CLE = scenarios(load_LE * rng.lognormal(0.0, 0.5, (4, 58, 256)))
    standing = balance(Problem(load_LE[None], pool)).placement()
    huge_LE = rng.lognormal(0.0, 1.0, (1, 61, 384))
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "one load": (lambda: balance(Problem(load_LE[None], pool)), 30),
        "one load, EPLB": (lambda: eplb(load_LE, 32, 288), 3),
        "four scenarios": (lambda: balance(Problem(load_CLE, pool)), 9),
        "four scenarios, 580 moves": (
            lambda: balance(Problem(load_CLE, pool, current=standing, moves=580)),
            9,
        ),
        "one load, 580 moves": (lambda: balance(Problem(load_CLE[:1], pool, current=standing, moves=580)), 9),
        "1024 nodes, one load": (lambda: balance(Problem(huge_LE, big)), 5),
        "1024 nodes, a slot each": (lambda: balance(Problem(huge_LE, Nodes.even(1024, 1024))), 3),
    }
    for name, (run, repeats) in runs.items():
        run()
        times = sorted(_milliseconds(run) for _ in range(repeats))
        yield {
            "bench": "speed", "case": name, "repeats": repeats, "ms_median": statistics.median(times),
            "ms_min": times[0], "ms_max": times[-1],
        }  # fmt: skip


def _milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def table_of(rows: list[Row]) -> str:
    """Markdown; figures to four digits."""
    head = list(rows[0])[1:]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = [f"{row[key]:.4g}" if isinstance(row[key], float) else str(row[key]) for key in head]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    wanted = sys.argv[1:] or ["known", "drift", "moves", "speed"]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    stamp = {
        "machine": machine(),
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for name in wanted:
        rows = list({"known": known, "drift": drift, "moves": moves, "speed": speed}[name]())
        print(f"\n## {name}\n\n{table_of(rows)}")
        with (ROOT / "bench" / "results" / "placement.jsonl").open("a") as out:
            out.writelines(json.dumps(row | stamp) + "\n" for row in rows)


if __name__ == "__main__":
    main()
