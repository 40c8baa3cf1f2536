"""Renders the README's numbers from the rows in bench/results: `python -m bench.tables` rewrites its section.

Nothing is typed by hand; what has no rows is left out. Each function reads one file and returns markdown.
"""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"
Row = Mapping[str, Any]


def rows(name: str) -> list[Row]:
    path = RESULTS / f"{name}.jsonl"
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def newest(found: Iterable[Row], *keys: str) -> list[Row]:
    """The last row of each kind, in the order in which kinds first came."""
    kept: dict[tuple[Any, ...], Row] = {}
    for row in found:
        kept[tuple(str(row.get(key)) for key in keys)] = row
    return list(kept.values())


def table(head: list[str], lines: Iterable[Iterable[object]]) -> str:
    drawn = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*drawn, *("| " + " | ".join(map(str, line)) + " |" for line in lines)])


def where(row: Row) -> str:
    load = f", load average {row['load']}" if "load" in row else ""
    return f"{row['machine']}{load}, {row['date'][:10]}"


def peers() -> str:
    found = newest(rows("peers"), "model", "engine", "batch")
    if not found:
        return ""
    batches = sorted({row["batch"] for row in found})
    by = {(row["engine"], row["batch"]): row for row in found}
    engines = list(dict.fromkeys(row["engine"] for row in found))
    lines = [
        [
            engine,
            *(f"{by[engine, b]['tokens_per_second']:,.0f}" if (engine, b) in by else "" for b in batches),
        ]
        for engine in engines
    ]
    ours = [engine for engine in engines if engine in ("colocated", "afd 1x1")]
    others = [engine for engine in engines if engine not in ours]
    ratios = [
        [f"{engine} / {other}", *(f"{by[engine, b]['ratio'][other]:.2f}" for b in batches)]
        for engine in ours
        for other in others
    ]
    first = found[0]
    return (
        f"**The engine beside its peers** ({first['model']}, prompt {first['prompt_len']}, output {first['output_len']}, "
        f"{first['threads']} threads in all, medians of {first['rounds']} rounds in turn; {where(first)}). Generated "
        "tokens per second by batch; `python -m bench.peers`.\n\n"
        + table(["engine", *map(str, batches)], lines)
        + "\n\n"
        + table(["ratio, by round", *map(str, batches)], ratios)
    )


def decode() -> str:
    found = newest(rows("decode"), "model", "engine", "nodes")
    lines = [
        [
            row["model"],
            row["engine"] + (f" {row['nodes']}" if row["nodes"] else ""),
            f"{row['start_to_ready']:.1f} s",
            ", ".join(f"{name} {value:,.0f}" for name, value in row["peak_mib"].items() if value),
        ]
        for row in found
    ]
    if not lines:
        return ""
    return (
        f"**Start and memory** ({where(found[-1])}); `afserve bench decode --model DIR --out bench/results/decode.jsonl`.\n\n"
        + table(["model", "engine", "start to ready", "peak MiB"], lines)
    )


def m2n() -> str:
    found = newest([r for r in rows("m2n") if "p50_us" in r], "transport", "bytes", "pairs", "cores")
    wanted = [r for r in found if r["pairs"] == "1x1" and r["cores"] == "quiet"]
    if not wanted:
        return ""
    sizes = sorted({r["bytes"] for r in wanted})
    by = {(r["transport"], r["bytes"]): r for r in wanted}
    wires = list(dict.fromkeys(r["transport"] for r in wanted))
    cell = lambda w, b: f"{by[w, b]['p50_us']:,.0f} / {by[w, b]['p99_us']:,.0f}" if (w, b) in by else ""  # noqa: E731
    return (
        f"**Round trips, 1:1** ({where(wanted[-1])}). p50 / p99 in us by bytes each way; `python -m bench.m2n --quick`.\n\n"
        + table(
            ["transport", *(f"{b // 1024} KiB" for b in sizes)],
            [[w, *(cell(w, b) for b in sizes)] for w in wires],
        )
    )


def pipeline() -> str:
    found = newest([r for r in rows("pipeline") if "of_bound" in r], "experiment", "nodes", "micro_batches")
    if not found:
        return ""
    lines = [
        [r["experiment"], r["nodes"], r["micro_batches"], f"{r['layers_per_s']:.1f}", f"{r['of_bound']:.3f}"]
        for r in found
    ]
    return (
        f"**Ping-pong with scripted stages** ({where(found[-1])}); `python -m bench.pipeline`.\n\n"
        + table(["experiment", "nodes", "micro-batches", "layers/s", "of the bound"], lines)
    )


def placement() -> str:
    found = rows("placement")
    known = [
        r for r in found if r["bench"] == "known" and r["slots"] > r["nodes"] and r["model"] == "olmoe_1b7b"
    ]
    if not known:
        return ""
    per = [
        [
            f"{r['nodes']}, {r['slots']}",
            f"{r['gap_mean']:.2%}",
            f"{r['gap_worst']:.2%}",
            f"{r['eplb_gap_mean']:.2%}",
            f"{r['eplb_gap_worst']:.2%}",
        ]
        for r in known
    ]
    drift = [
        [
            f"{r['nodes']}, {r['slots']}",
            r["seen"],
            f"{r['eplb_mean']:.2f} / {r['eplb_worst']:.2f}",
            f"{r['static_mean']:.2f} / {r['static_worst']:.2f}",
            f"{r['levelled_mean']:.2f} / {r['levelled_worst']:.2f}",
        ]
        for r in found
        if r["bench"] == "drift" and r["seen"] == 3
    ]
    follow = [
        [f"{r['nodes']}, {r['slots']}", f"{r['ratio']:.2f}", r["moves"], f"{r['eplb_ratio']:.2f}", r["eplb_moves"],
         f"{r['never_moved_ratio']:.2f}"]
        for r in found
        if r["bench"] == "follow"
    ]  # fmt: skip
    speed = [
        [r["case"], f"{r['cpu_ms_median']:.1f}", f"{r['wall_ms_median']:.1f}"]
        for r in found
        if r["bench"] == "speed"
    ]
    return "\n\n".join(
        [
            f"**Placement** on recorded OLMoE counts against DeepSeek's EPLB ({where(known[0])}); `python -m bench.placement`. "
            "Gap to the proven lower bound, loads known:",
            table(["nodes, slots", "ours, mean", "worst", "EPLB, mean", "worst"], per),
            "Judged on a domain that was not seen (three others were): max/mean, mean / worst. Bars of the project: 25 % "
            "closer to 1 than EPLB; it holds where shares follow the live load, not with static shares, and not for "
            "every shape's worst case.",
            table(
                ["nodes, slots", "domains seen", "EPLB", "ours, static shares", "ours, shares follow"], drift
            ),
            "Domains switch every minute, four minutes: max/mean over time and experts moved.",
            table(["nodes, slots", "ours", "moves", "EPLB every 10 s", "moves", "never moved"], follow),
            "Time of one placement, milliseconds:",
            table(["case", "CPU", "wall"], speed),
        ]
    )


def planner() -> str:
    from bench.planner import markdown

    path = RESULTS / "planner.jsonl"
    if not path.exists():
        return ""
    return (
        "**Planner** against published tables and measured rows; `python -m bench.planner`.\n\n"
        + markdown(path)
    )


def planner_self() -> str:
    found = [r for r in rows("planner_self") if "tpot_error" in r]
    if not found:
        return ""
    lines = [
        [
            r["layout"],
            r["batch"],
            f"{1000 * r['tpot']:.1f}",
            f"{1000 * r['predicted_tpot']:.1f}",
            f"{r['tpot_error']:+.0%}",
        ]
        for r in newest(found, "layout", "batch")
    ]
    return (
        f"**afserve itself, predicted and measured** ({where(found[-1])}); `python -m bench.planner_self`.\n\n"
        + table(["layout", "batch", "TPOT ms", "predicted", "error"], lines)
    )


def kernels() -> str:
    found = [r for r in rows("kernels") if "op" in r]
    if not found:
        return ""
    head = [
        k
        for k in found[-1]
        if k not in ("bench", "machine", "commit", "date", "load", "low", "high", "peer_low", "peer_high")
    ]
    lines = [
        [f"{r[k]:.3g}" if isinstance(r.get(k), float) else r.get(k, "") for k in head]
        for r in newest(found, *head[:5])
    ]
    return f"**Kernels on a CPU** ({where(found[-1])}); `python -m bench.kernels`.\n\n" + table(head, lines)


def live() -> str:
    found = newest(rows("live_placement"), "mode")
    if not found:
        return ""
    head = [k for k in found[-1] if k not in ("bench", "machine", "commit", "date", "load")]
    lines = [[f"{r[k]:.3g}" if isinstance(r.get(k), float) else r.get(k, "") for k in head] for r in found]
    return (
        f"**Placements that change under load**, nano on 2x3 ({where(found[-1])}); `python -m bench.live_placement`.\n\n"
        + table(head, lines)
    )


SECTIONS: tuple[Callable[[], str], ...] = (
    peers, decode, kernels, m2n, pipeline, placement, live, planner, planner_self,
)  # fmt: skip
GPU = "**GPU**: not measured. The Triton kernels run in the interpreter and compile for sm_80 to sm_100; `python -m bench.kernels_cuda` measures them."


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [part for part in (section() for section in SECTIONS) if part]
    readme.write_text(
        before + BEGIN + "\n" + "\n\n".join([*parts, GPU]) + "\n" + END + after, encoding="utf-8"
    )


if __name__ == "__main__":
    main()
