"""Renders the rows of bench/results: `python -m bench.tables` rewrites the tables of bench/RESULTS.md and lines of README.md.

Nothing is typed by hand; what has no rows is left out. Each function reads one file and returns markdown.
"""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

import argparse
from collections.abc import Callable
from pathlib import Path

from bench import (
    gpu_budget,
    gpu_expected,
    tables_agents,
    tables_cores,
    tables_drafts,
    tables_faults,
    tables_goodput,
    tables_hosts,
    tables_kv_dtype,
    tables_peers,
    tables_phases,
    tables_pilot,
    tables_planner,
    tables_serve,
    tables_start,
    tables_wires,
)
from bench.headline import headline
from bench.rows import ROOT, Row, newest, rows, table, where

BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"


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


def real_pipeline() -> str:
    found = newest(
        [r for r in rows("pipeline") if r["experiment"] == "real model"], "batch", "mode", "micro_batches"
    )
    if not found:
        return ""
    share = lambda row, key: f"{row[key]:.0%}" if row.get(key) is not None else ""  # noqa: E731
    lines = [
        [
            r["batch"], r["mode"], r["micro_batches"], f"{r['tok_s']:,.0f}", share(r, "attention_bubble"), share(r, "expert_bubble"),
            share(r, "hidden"),
        ]
        for r in found
    ]  # fmt: skip
    return (
        f"**Ping-pong on a real model**, {found[0]['model']} on 1x1 and one core each ({where(found[-1])}); `afserve bench pipeline`.\n\n"
        + table(
            ["batch", "mode", "micro-batches", "tok/s", "attention idle", "experts idle", "transfer hidden"],
            lines,
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
            f"{r['eplb_mean']:.2f} / {r['eplb_worst']:.2f}",
            f"{r['static_mean']:.2f} / {r['static_worst']:.2f}",
            f"{r['levelled_mean']:.2f} / {r['levelled_worst']:.2f}",
            f"{r['closer_mean']:.0%} / {r['closer_worst']:.0%}",
            f"{r['drawn_closer_mean']:.0%} / {r['drawn_closer_worst']:.0%}",
        ]
        for r in found
        if r["bench"] == "drift" and "drawn_closer_mean" in r
    ]
    follow = [
        [f"{r['nodes']}, {r['slots']}", f"{r['ratio']:.2f}", r["moves"], f"{r['eplb_ratio']:.2f}", r["eplb_moves"],
         f"{r['never_moved_ratio']:.2f}"]
        for r in found
        if r["bench"] == "follow"
    ]  # fmt: skip
    pools = [
        [
            r["nodes"],
            r["slots_each"],
            r["replicas"],
            f"{r['ratio']:.2f}",
            f"{r['worst']:.2f}",
            f"{r['serves_as']:.1f}",
        ]
        for r in found
        if r["bench"] == "pools"
    ]
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
            "Placements are made from one to three domains and judged on another one, in every split. A cell is the load of the fullest "
            'node over the mean: the mean over all splits / the worst split. "Shares follow": afserve\'s shares follow the live load '
            'within two seconds, and no weights move. "Closer to 1": how much of EPLB\'s excess over 1 is gone, in the mean / in the worst '
            "split. The project's bar is 25 %. The mean meets it wherever there is a spare slot; the worst split does not everywhere. "
            '"Over draws" repeats this with counts drawn anew with 2 % noise, which shows how much of a figure hangs on a single tie.',
            table(
                [
                    "nodes, slots",
                    "EPLB",
                    "ours, static shares",
                    "ours, shares follow",
                    "closer to 1",
                    "over draws",
                ],
                drift,
            ),
            "The domain switches every minute, for four minutes: the load of the fullest node over the mean, over time, and experts moved.",
            table(["nodes, slots", "ours", "moves", "EPLB every 10 s", "moves", "never moved"], follow),
            "Pools that grow, each node with as many slots as the first ones: slots beyond the 64 experts hold replicas. Loads known; the load of the fullest node over the mean, "
            "and how many nodes serve as much whose loads are even (nodes over that ratio):",
            table(
                ["nodes", "slots of each", "replicas", "fullest / mean", "worst layer", "serves as"], pools
            ),
            "Time of one placement, milliseconds:",
            table(["case", "CPU", "wall"], speed),
        ]
    )


def kernels() -> str:
    found = newest(rows("kernels"), "op", "case", "threads")
    limits = {r["threads"]: r for r in found if r["op"] == "limits"}
    if not limits:
        return ""

    def ratio(row: Row, key: str) -> str:
        return f"{row[key]:.2f}" if key in row else ""

    lines = [
        [
            r["op"],
            r["case"],
            r["threads"],
            f"{r['us_best']:,.0f}",
            *(ratio(r, k) for k in ("of_read", "of_mm", "over_peer")),
        ]
        for r in sorted(found, key=lambda r: (r["threads"], r["op"]))
        if r["op"] in ("expert_ffn", "attend_gqa")
    ]
    reads = ", ".join(
        f"{r['read_gb_s']:.0f} GB/s and {r['mm_gflop_s']:,.0f} GFLOP/s on {t} thread(s)"
        for t, r in limits.items()
    )
    small = ", ".join(
        f"{r['share_of_layer']:.1%} at {r['case']} on {r['threads']} thread(s)"
        for r in sorted(found, key=lambda r: (r["threads"], r["us_best"] if r["op"] == "small_ops" else 0))
        if r["op"] == "small_ops"
    )
    days = sorted({str(r["date"]) for r in found})
    runs = f"Rows are of {' and '.join(days)}, each against its own run's limits. " if len(days) > 1 else ""
    return (
        f"**Kernels on a CPU** ({where(found[-1])}); `python -m bench.kernels`. {runs}Limits of the newest runs, a plain read and "
        f'`torch.mm`: {reads}. "Of the read" counts 16 bits for a bf16 weight, of which 12 are read, and 8 for int8. Aims: 0.80 of the '
        "read for few rows, 0.60 of `mm` at 128 rows, 0.70 of the read for attention. Of a layer's time, all work beside products and "
        f"attention takes {small} (aim: under 15 %).\n\n"
        + table(["op", "case", "threads", "us", "of the read", "of mm", "over torch's loop"], lines)
    )


def live() -> str:
    found = newest(rows("live_placement"), "rebalance")
    if not found:
        return ""
    names = {
        "rebalance": "rebalance", "itl_p50_ms": "p50 ms", "itl_p99_ms": "p99 ms", "p99_ratio": "p99 ratio", "failed": "failed",
        "texts_alike": "texts alike", "texts": "of", "epochs": "epochs", "moves": "moves",
    }  # fmt: skip
    lines = [[f"{r[k]:.3g}" if isinstance(r[k], float) else r[k] for k in names if k in r] for r in found]
    worst = max(float(r["p99_ratio"]) for r in found)
    return (
        f"**Placements that change under load**, nano on 2x3, five node processes on two cores ({where(found[-1])}); "
        f"`python -m bench.live_placement`. The aim of a p99 within 10 % is {'' if worst <= 1.1 else 'not '}met here.\n\n"
        + table([v for k, v in names.items() if k in found[0]], lines)
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "The engine beside its peers": tables_peers.peers,
    "In few bits beside its peers": tables_peers.peers_in_few_bits,
    "The expert FFN beside kt-kernel": tables_peers.experts,
    "AFD on one host beside the colocated engine": tables_cores.lent,
    "Start and memory": decode,
    "Start and memory of large models": tables_start.large,
    "Placements that change under load": live,
    "Nodes that are killed and stopped under load": tables_faults.nodes,
    "Networks that are cut, lossy or slow": tables_faults.networks,
    "Nodes that come, go and change while they serve": tables_faults.changes,
    "What is lost, alone and with others": tables_faults.survival,
    "What surviving losses costs, and a long run under faults": tables_faults.cost_and_soak,
    "A host that is overloaded": tables_faults.overloaded,
    **tables_phases.SECTIONS,
    "Kernels on a CPU, against the machine's limits": kernels,
    "Arm's loops, counted": tables_peers.arm,
    "Transports: round trips against gloo, Unix sockets and memcpy": tables_wires.m2n,
    "Transports between hosts": tables_wires.hosts,
    "Both transports of a deployment on several hosts": tables_wires.pairs,
    "What encryption between hosts costs": tables_hosts.tls,
    "A controller with thousands of nodes": tables_hosts.members,
    "Ping-pong against its bound": pipeline,
    "Ping-pong on a real model": real_pipeline,
    "Placement against its lower bound and EPLB, under drift, and its speed": placement,
    "Goodput of shared experts, P/D with two copies and chunked prefill": tables_goodput.goodput,
    "Pools that size themselves": lambda: "\n\n".join(
        filter(None, (tables_pilot.pilot(), tables_pilot.live()))
    ),
    "Drafts: several tokens a step": tables_drafts.speed,
    "Drafts: what none cost": tables_drafts.off,
    "Drafts beside llama.cpp's": tables_drafts.peers,
    "Drafts: a price beside fixed lengths": tables_drafts.draft_price,
    "What agents find again": tables_agents.agents,
    "Fidelity: what fewer bits change": tables_kv_dtype.fidelity,
    "A KV cache in 8 bits": tables_kv_dtype.decode,
    "Sparse attention beside full attention": tables_kv_dtype.sparse,
    **tables_serve.SECTIONS,
    "What times tell of other keys' prompts": tables_serve.tenants,
    "Planner against published tables and measured rows": tables_planner.published,
    "Planner against afserve itself": tables_planner.itself,
}
GPU = (
    "**GPU**: not measured. The Triton kernels are tested in the interpreter and compiled for sm_90 and sm_100 by tests, each within a budget of registers and loads (`bench/gpu_budget.jsonl`); the path around them (which "
    "tensor is on which device, no layer waits for the device) is tested on pretended GPUs. On a machine with a GPU, "
    "`python -m bench.gpu_first_run` compiles and tests the kernels, compares the tokens of all topologies and measures, in half an hour."
)


def results() -> str:
    parts = [f"## {title}\n\n{body}" for title, section in SECTIONS.items() if (body := section())]
    return "\n\n".join([*parts, f"## GPUs\n\n{GPU}\n\n{gpu_budget.section()}\n\n{gpu_expected.section()}"])


def rendered(path: Path, body: str) -> str:
    """The text of `path` with `body` between its markers."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{body}\n{END}{after}"


TARGETS: dict[Path, Callable[[], str]] = {
    ROOT / "bench" / "RESULTS.md": results,
    ROOT / "README.md": headline,
}


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.tables", description=__doc__.splitlines()[0]).parse_args()
    for path, body in TARGETS.items():
        path.write_text(rendered(path, body()), encoding="utf-8")


if __name__ == "__main__":
    main()
