"""The numbers of the README, each from rows of bench/results; `python -m bench.tables` writes them.

A number is a line: what it is, its value, what it is beside, the processor, and the command that made the row. The tables
behind them are in bench/RESULTS.md.
"""

# ruff: noqa: E501  sentences, easier to read unwrapped

from collections.abc import Callable, Iterable
from typing import Any

from bench.rows import Row, newest, rows, runs_with, table

Line = tuple[str, str, str, str, str]
_TOGETHER = 32  # sequences


def one(found: Iterable[Row], **wanted: Any) -> Row:
    """The last row with these values."""
    return [row for row in found if all(row.get(key) == value for key, value in wanted.items())][-1]


def times(ratio: Row, peer: str) -> str:
    """The ratio to a peer whatever its version; "on all cores" tells the two vLLM rows apart."""
    name = next(name for name in reversed(list(ratio)) if all(word in name for word in peer.split("|")))
    return f"{ratio[name]:.2f} x"


def processor(row: Row) -> str:
    """With the instruction set where the row has it."""
    name = row["machine"].split(",")[0].replace("(R)", "").replace(" Processor", "")
    return f"{name}, {row['isa']}" if row.get("isa") else name


def beside_llama(isa: str, batch: int) -> Row:
    """Of the Qwen shape in bf16, beside a llama.cpp that was built for `isa`."""
    made_here = [row for row in rows("peers") if not row["model"].endswith(".gguf")]
    found = [row for row in made_here if row["model"].startswith("qwen") and row.get("experts") == "auto"]
    return one(found, engine="colocated", phase="decode", batch=batch, llama_isa=isa)


def in_avx2() -> Line:
    single, many = (beside_llama("avx2", batch) for batch in (1, _TOGETHER))
    return (
        f"the same with AVX2 alone, in an hour of its own, at batch {_TOGETHER} and at 1",
        f"{many['tokens_per_second']:,.0f}, {single['tokens_per_second']:,.0f}",
        f"{times(many['ratio'], 'llama.cpp')} and {times(single['ratio'], 'llama.cpp')} llama.cpp built for AVX2",
        processor(many),
        "python -m bench.peers --isa avx2",
    )


def in_avx512() -> Line:
    single, many = (beside_llama("native", batch) for batch in (1, _TOGETHER))
    return (
        f"the same in another hour, at batch {_TOGETHER} and at 1",
        f"{many['tokens_per_second']:,.0f}, {single['tokens_per_second']:,.0f}",
        f"{times(many['ratio'], 'llama.cpp')} and {times(single['ratio'], 'llama.cpp')} llama.cpp built for this processor",
        processor(many),
        "python -m bench.peers",
    )


def with_vllm() -> list[Row]:
    """Rows of runs of the Qwen shape that had vLLM in them."""
    return [
        row
        for row in rows("peers")
        if row["model"].startswith("qwen") and any("vllm" in peer for peer in row["ratio"])
    ]


def colocated() -> Line:
    row = one(with_vllm(), engine="colocated", batch=_TOGETHER)
    ratio = row["ratio"]
    return (
        f"generated tokens/s, {row['threads']} threads, batch {_TOGETHER}, colocated",
        f"{row['tokens_per_second']:,.0f}",
        f"{times(ratio, 'vllm|all cores')} vLLM on the same cores, {times(ratio, 'llama.cpp')} llama.cpp, "
        f"{times(ratio, 'transformers')} transformers",
        processor(row),
        "python -m bench.peers",
    )


def disaggregated() -> Line:
    found = with_vllm()
    row = one(found, engine="afd 1x1", batch=_TOGETHER)
    whole = one(found, engine="colocated", batch=_TOGETHER)
    return (
        "the first with attention and experts in two processes that lend each other their cores",
        f"{row['tokens_per_second']:,.0f}",
        f"{times(row['ratio'], 'vllm|all cores')} vLLM on the same cores; colocated has {whole['tokens_per_second']:,.0f}",
        processor(row),
        "python -m bench.peers",
    )


def ping_pong() -> Line:
    found = rows("pipeline")
    kind = {"experiment": "real model", "batch": 64, "mode": "afd"}
    alone, two = (one(found, **kind, micro_batches=m) for m in (1, 2))
    return (
        "generated tokens/s with 2 micro-batches, one core a node",
        f"{two['tok_s']:,.0f}",
        f"{alone['tok_s']:,.0f} with 1; {two['hidden']:.0%} of the transfers are hidden, {alone['hidden']:.0%} before",
        processor(two),
        "afserve bench pipeline",
    )


def start() -> Line:
    found = rows("decode")
    row = one(found, engine="afd", nodes="1x1")
    peer = [other for other in found if "transformers" in other["engine"]][-1]
    return (
        "start to ready, 110 M parameters",
        f"{row['start_to_ready']:.1f} s",
        f"transformers {peer['start_to_ready']:.1f} s",
        processor(row),
        "afserve bench decode",
    )


def live() -> Line:
    row = one(rows("live_placement"), rebalance="1")
    return (
        "p99 between tokens while placements change every second, over none",
        f"{row['p99_ratio']:.2f} x",
        f"{row['p99_ratio_min']:.2f} to {row['p99_ratio_max']:.2f} by round; {row['epochs']} placements, {row['failed']} failed, "
        f"{row['texts_alike']} of {row['texts']} texts alike",
        processor(row),
        "python -m bench.live_placement",
    )


def kernels() -> Line:
    row = one(
        newest(rows("kernels"), "op", "case", "threads"),
        op="expert_ffn",
        case="16x2048x768 bf16 rows 4",
        threads=1,
    )
    return (
        "expert FFN of 4 rows, of the speed of reading its weights",
        f"{row['of_read']:.2f}",
        f"{row['over_peer']:.1f} x torch's loop",
        processor(row),
        "python -m bench.kernels",
    )


def shared_memory() -> Line:
    found = [
        row
        for row in runs_with(rows("m2n"), "dist")
        if row.get("pairs") == "1x1" and row.get("cores") == "quiet"
    ]
    ours, peer = (one(found, transport=kind, bytes=32768) for kind in ("shm", "gloo"))
    return (
        "round trip of 32 KiB each way on one host, p50",
        f"{ours['p50_us']:.0f} us",
        f"gloo {peer['p50_us']:.0f} us",
        processor(ours),
        "python -m bench.m2n",
    )


def between_hosts() -> Line:
    found = [row for row in runs_with(rows("m2n_hosts"), "dist") if "p50_us" in row]
    ours, peer = (one(found, transport=kind, bytes=32768, pairs="1x1") for kind in ("tcp", "gloo"))
    return (
        "the same between two network namespaces, tcp",
        f"{ours['p50_us']:.0f} us",
        f"gloo {peer['p50_us']:.0f} us",
        processor(ours),
        "python -m bench.m2n_hosts",
    )


def placement() -> Line:
    row = one(rows("placement"), bench="drift", nodes=16, slots=96)
    return (
        "load of the fullest node over the mean, a domain not seen, 16 nodes",
        f"{row['levelled_mean']:.2f}",
        f"EPLB {row['eplb_mean']:.2f}; the worst case is {row['levelled_worst']:.2f} to EPLB's {row['eplb_worst']:.2f}",
        "any",
        "python -m bench.placement",
    )


def planner() -> Line:
    found = rows("planner")
    row = one(found, claim="measured configurations", case="all")
    return (
        f"the planner's median TPOT error on {row['rows']:,} published rows",
        f"{row['tpot_error']:.1%}",
        f"each asked through `afserve plan`, unseen in fitting; {row['inside_80']:.0%} lie in the 80 % interval",
        "any",
        "python -m bench.planner",
    )


LINES: tuple[Callable[[], Line], ...] = (
    colocated,
    in_avx512,
    in_avx2,
    disaggregated,
    ping_pong,
    start,
    live,
    kernels,
    shared_memory,
    between_hosts,
    placement,
    planner,
)


def headline() -> str:
    lines = [
        (what, value, beside, processor, f"`{command}`")
        for what, value, beside, processor, command in (f() for f in LINES)
    ]
    return table(["what", "afserve", "beside it", "processor", "made by"], lines)
