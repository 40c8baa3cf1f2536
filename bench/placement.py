"""Placement against its lower bound, against EPLB, under drift, and in time: the claims of `placement/`, measured.

    python -m bench.placement [known|drift|limits|product|moves|follow|pools|speed|gain ...] [--json] [--save]

Loads are recorded expert counts of OLMoE-1B-7B and Mixtral-8x7B (../shared/data/routing) and, for speed, a
lognormal of the sizes named.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from afserve.placement.optimizer.balance import balance
from afserve.placement.optimizer.bound import lower_bound
from afserve.placement.optimizer.current import count_moves
from afserve.placement.optimizer.outcome import Balanced, Certificate
from afserve.placement.optimizer.problem import Floats, Ints, Nodes, Problem, scenarios
from afserve.placement.optimizer.split import node_load, split
from afserve.placement.placement import Placement
from afserve.placement.rebalance.rebalancer import Rebalancer
from afserve.placement.rebalance.record import read_counts
from afserve.placement.rebalance.stats import RoutingStats
from bench.eplb import eplb
from bench.origin import ROOT, origin
from bench.placement_drift import drift, limits, merged, product, ratios
from bench.placement_gain import gain

DATA = ROOT.parent / "shared" / "data" / "routing"
RESULTS = ROOT / "bench" / "results" / "placement.jsonl"
SHAPES = ((8, 64), (8, 72), (16, 80), (16, 96), (32, 96), (32, 128))
POOLS = (
    (8, 8),
    (8, 9),
    (9, 8),
    (12, 8),
    (16, 4),
    (16, 5),
    (20, 4),
    (24, 4),
    (32, 2),
    (32, 3),
    (36, 2),
    (48, 2),
)  # nodes, slots of each
Row = dict[str, object]


def domains(model: str) -> dict[str, Floats]:
    return read_counts((DATA / f"{model}_expert_counts.json").read_text())


def known() -> Iterator[Row]:
    """Claim 1: the gap to the bound for loads that are known."""
    for model, shapes in (("olmoe_1b7b", SHAPES), ("mixtral_8x7b", ((2, 10), (4, 12), (8, 16), *SHAPES))):
        for nodes, slots in shapes:
            ours, theirs = [], []
            for load_LE in domains(model).values():
                pool = Nodes.even(nodes, slots)
                bound = lower_bound(load_LE, pool.usable_slots().clip(max=load_LE.shape[1]), pool.pace())
                found = balance(Problem(scenarios(load_LE), pool))
                ours += list(node_load(found.slot_LNS, found.share_LNS, load_LE).max(1) / bound - 1)
                theirs += list(node_load(*eplb(load_LE, nodes, slots), load_LE).max(1) / bound - 1)
            worse = sum(bool(a > b + 1e-9) for a, b in zip(ours, theirs, strict=True))
            yield {
                "bench": "known", "model": model, "nodes": nodes, "slots": slots, "cases": len(ours),
                "gap_mean": statistics.fmean(ours), "gap_worst": max(ours),
                "eplb_gap_mean": statistics.fmean(theirs), "eplb_gap_worst": max(theirs), "worse_than_eplb": worse,
            }  # fmt: skip


def drifts() -> Iterator[Row]:
    """Claim 2: placed on one, two or three domains, judged on a domain that was not among them."""
    return drift(domains("olmoe_1b7b"), SHAPES)


def limit() -> Iterator[Row]:
    """What no rule can know in advance where there is no spare slot."""
    return limits(domains("olmoe_1b7b"))


def follows() -> Iterator[Row]:
    """That shares follow in the product, and how soon."""
    return product(domains("olmoe_1b7b"), SHAPES[1:])


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
                in_force = first.placement()
                if start == "eplb":
                    in_force = as_placement(merged(before), table[old])
                found = balance(Problem(scenarios(table[new]), pool, current=in_force, moves=quarter))
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


def follow() -> Iterator[Row]:
    """The domain switches every minute; 4,000 rows a layer come every quarter of a second.

    Ours is the rebalancer with its own rules; EPLB places anew every ten seconds from the counts of those; a
    move is in force a second after it was decided, for both. What counts is the mean of max/mean over time, on
    the loads as they come.
    """
    table = domains("olmoe_1b7b")
    share_DLE = [load / load.sum(1, keepdims=True) for load in table.values()]
    for nodes, slots in SHAPES[1:]:
        start = balance(Problem(scenarios(share_DLE[0] * 1e6), Nodes.even(nodes, slots))).placement(1)
        ours, moved = _follow_ours(share_DLE, nodes, slots, start)
        theirs, peer_moved = _follow_eplb(share_DLE, nodes, slots)
        still = _never_moved(share_DLE, start)
        yield {
            "bench": "follow", "nodes": nodes, "slots": slots, "seconds": 60 * len(share_DLE),
            "ratio": ours, "moves": moved, "eplb_ratio": theirs, "eplb_moves": peer_moved, "never_moved_ratio": still,
        }  # fmt: skip


def _ticks(share_DLE: list[Floats]) -> Iterator[tuple[float, Floats, Floats]]:
    """(seconds, true loads, drawn counts), four a second, a minute of each domain."""
    rng = np.random.default_rng(0)
    for tick in range(240 * len(share_DLE)):
        share_LE = share_DLE[tick // 240]
        yield tick / 4, share_LE, np.array([rng.multinomial(4000, row) for row in share_LE])


def _never_moved(share_DLE: list[Floats], start: Placement) -> float:
    slot_LNS, share_LNS = start.slot_array(), start.share_array()
    return statistics.fmean(float(ratios(slot_LNS, share_LNS, load_LE).mean()) for load_LE in share_DLE)


def _follow_ours(share_DLE: list[Floats], nodes: int, slots: int, start: Placement) -> tuple[float, int]:
    core, stats = Rebalancer(start, Nodes.even(nodes, slots)), RoutingStats(*share_DLE[0].shape)
    force, due, moved, seen = start, (0.0, start), 0, []
    for now, load, counts in _ticks(share_DLE):
        if due[0] <= now and force is not due[1]:
            force = due[1]
            core.settle(force)
        seen.append(float(ratios(force.slot_array(), force.share_array(), load).mean()))
        stats.merge(counts)
        stats.advance_windows(now)
        decision = core.decide(now, stats)
        if decision is not None and decision.placement is not None:
            due, moved = (now + 1.0, decision.placement), moved + decision.moves
    return statistics.fmean(seen), moved


def _follow_eplb(share_DLE: list[Floats], nodes: int, slots: int) -> tuple[float, int]:
    force = due = eplb(share_DLE[0], nodes, slots)
    gathered, moved, seen = np.zeros(share_DLE[0].shape), 0, []
    for number, (_, load, counts) in enumerate(_ticks(share_DLE)):
        if number % 40 == 4:
            force = due
        seen.append(float(ratios(*force, load).mean()))
        gathered += counts
        if number % 40 == 39:
            due = eplb(gathered, nodes, slots)
            moved += int(count_moves(force[0], due[0], load.shape[1]).sum())
            gathered[:] = 0
    return statistics.fmean(seen), moved


def pools() -> Iterator[Row]:
    """What replicas bring that come with expert nodes, each of which has as many slots as the first ones: known loads,
    and how many nodes that share their rows evenly serve as much."""
    for nodes, each in POOLS:
        pool, found = Nodes.even(nodes, nodes * each), list[float]()
        for load_LE in domains("olmoe_1b7b").values():
            placed = balance(Problem(scenarios(load_LE), pool))
            found += list(ratios(placed.slot_LNS, placed.share_LNS, load_LE))
        ratio = statistics.fmean(found)
        yield {
            "bench": "pools", "nodes": nodes, "slots_each": each, "replicas": nodes * each - 64, "ratio": ratio,
            "worst": max(found), "serves_as": nodes / ratio,
        }  # fmt: skip


def speed() -> Iterator[Row]:
    """Claim 3: milliseconds on one core, the baseline beside it. `cpu` is this thread's own time."""
    rng = np.random.default_rng(0)
    load_LE = rng.lognormal(0.0, 1.0, (58, 256))
    pool, big = Nodes.even(32, 288), Nodes.even(1024, 2048)
    load_CLE = scenarios(load_LE * rng.lognormal(0.0, 0.5, (4, 58, 256)))
    in_force = balance(Problem(load_LE[None], pool)).placement()
    huge_LE = rng.lognormal(0.0, 1.0, (1, 61, 384))
    huge_CLE = scenarios(huge_LE * rng.lognormal(0.0, 0.5, (4, 61, 384)))
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "32 nodes, 288 slots: one load": (lambda: balance(Problem(load_LE[None], pool)), 30),
        "the same as a Placement": (lambda: balance(Problem(load_LE[None], pool)).placement(), 30),
        "the same, EPLB": (lambda: eplb(load_LE, 32, 288), 5),
        "four scenarios": (lambda: balance(Problem(load_CLE, pool)), 9),
        "four scenarios, 580 moves": (
            lambda: balance(Problem(load_CLE, pool, current=in_force, moves=580)),
            9,
        ),
        "one new load, 580 moves": (
            lambda: balance(Problem(load_CLE[:1], pool, current=in_force, moves=580)),
            9,
        ),
        "1,024 nodes, 2,048 slots: one load": (lambda: balance(Problem(huge_LE, big)), 5),
        "1,024 nodes, 1,024 slots: one load": (lambda: balance(Problem(huge_LE, Nodes.even(1024, 1024))), 3),
        "1,024 nodes, 2,048 slots: four scenarios": (lambda: balance(Problem(huge_CLE, big)), 3),
    }
    for name, (run, repeats) in runs.items():
        run()
        times = [_milliseconds(run) for _ in range(repeats)]
        cpu, wall = sorted(t[0] for t in times), sorted(t[1] for t in times)
        yield {
            "bench": "speed", "case": name, "repeats": repeats, "cpu_ms_median": statistics.median(cpu),
            "cpu_ms_min": cpu[0], "cpu_ms_max": cpu[-1], "wall_ms_median": statistics.median(wall),
            "wall_ms_min": wall[0],
        }  # fmt: skip


def _milliseconds(run: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.thread_time(), time.perf_counter()
    run()
    return 1e3 * (time.thread_time() - cpu), 1e3 * (time.perf_counter() - wall)


def table_of(rows: list[Row]) -> str:
    """Markdown; figures to four digits."""
    head = [key for key in rows[0] if key not in {"bench", "machine", "commit", "date"}]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = [f"{row[key]:.4g}" if isinstance(row[key], float) else str(row[key]) for key in head]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gains() -> Iterator[Row]:
    """Claim 4, on the simulator: throughput by balancing at 32 to 256 nodes, net of moving."""
    return gain(domains("olmoe_1b7b"))


PARTS = {
    "known": known, "drift": drifts, "limits": limit, "product": follows, "moves": moves, "follow": follow,
    "pools": pools, "speed": speed, "gain": gains,
}  # fmt: skip


def save(rows: list[Row], measured: list[str]) -> None:
    """Rows of the parts measured now take the place of the older ones."""
    old = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    kept = [row for row in old if row["bench"] not in measured]
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *rows]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--json", action="store_true", help="one object a line instead of tables")
    parser.add_argument("--save", action="store_true", help="put the rows into bench/results/placement.jsonl")
    options = parser.parse_args()
    parts, rows = options.parts or list(PARTS), []
    for name in parts:
        found = [row | origin() for row in PARTS[name]()]
        rows += found
        print(
            "\n".join(map(json.dumps, found)) if options.json else f"\n## {name}\n\n{table_of(found)}",
            flush=True,
        )
    if options.save:
        save(rows, parts)


if __name__ == "__main__":
    main()
