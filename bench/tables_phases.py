"""Tables of prefill and decode on nodes of their own, and of KV that moves, stays and is found. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from bench.rows import Row, newest, rows, table, where

_ROUTERS = (
    "round robin",
    "gateway, untold",
    "gateway, untold, fetching",
    "gateway",
    "gateway, fetching",
    "all-knowing",
    "all-knowing, fetching",
)


def phases() -> str:
    found = newest([row for row in rows("phases") if "layers" in row], "experiment")
    if not found:
        return ""
    lines = [
        [
            row["experiment"],
            _figure(row, "token_ms", "{:.2f}"),
            _figure(row, "token_p99_ms", "{:.2f}"),
            _figure(row, "p99_of_alone", "{:.3f}"),
            f"{row['prompt_tok_s']:,}",
            _figure(row, "prompt_time_of_alone", "{:.3f}"),
            f"{row['busy']:.0%}",
        ]
        for row in found
    ]
    return (
        f"**Decode beside a flood of prompts at one expert node** ({where(found[-1])}); `python -m bench.phases --save`. The engine's expert node, stages of known "
        "length and a clock of their own, so the figures are the same on every machine. Aims: p99 at most 1.10 of decode alone, a prompt at most 1.15 times its time with the same "
        "prefill nodes alone. Where those keep the experts busy by themselves, prompts beside decoding take at least 1 / (1 - decode's share of the experts) of that: 1 / (1 - 0.30) = 1.43 with 4 nodes, and "
        "1 / (1 - 0.26) = 1.36 with 2 where experts are read. 1 node there waits for 2.72 ms of experts and 5 ms of its own a layer: (5 + 2.72 / (1 - 0.26)) / 7.72 = 1.12 at least. With 2 nodes of the first kind both ask for "
        "100 % before any piece costs a call. On a scripted device, whose calls are done later in blocks of 104 us (a decode call waits for two of 52), prompts have a queue that decoding goes before; one queue is what such a node had.\n\n"
        + table(
            [
                "case",
                "token ms",
                "p99 ms",
                "p99 of alone",
                "prompt tok/s",
                "prompt's time of alone",
                "experts busy",
            ],
            lines,
        )
    )


def handover() -> str:
    found = newest([row for row in rows("phases") if row["experiment"] == "hand-over"], "model", "tokens")
    if not found:
        return ""
    lines = [
        [
            row["model"],
            f"{row['tokens']:,}",
            f"{row['ttft_ms']:.1f}",
            f"{row['handed_ttft_ms']:.1f}",
            f"{row['adds']:+.1%}",
        ]
        for row in found
    ]
    return (
        f"**What a hand-over adds to the first token** ({where(found[-1])}); `python -m bench.handover --save`. Medians of {found[-1]['runs']} prompts of each of {found[-1].get('starts', 1)} starts in turns, real processes: "
        "one attention node that does both, then a prefill and a decode node. Aim: 5 % at 2,048 tokens.\n\n"
        + table(["model", "prompt", "together ms", "handed over ms", "adds"], lines)
    )


def split() -> str:
    found = newest(rows("split_prompts"), "name", "link", "tokens", "nodes")
    if not found:
        return ""
    lines = [
        [
            row["name"],
            f"{row['link'] / 1e9:g}",
            f"{row['tokens']:,}",
            str(row["nodes"]),
            f"{row['seconds']:.2f}",
            f"{row['of_alone']:.2f}",
            f"{row['predicted']:.2f}",
        ]
        for row in found
    ]
    one = found[-1]
    return (
        f"**A prompt on several prefill nodes** ({where(one)}); `python -m bench.split_prompts --save`. The engine's split, messages and waits, over a clock of their own: "
        f"a layer of a chunk of {one['chunk']:,} tokens takes {1e3 * one['layer']:g} ms whatever its context is, of {one['layers']} layers, and a slice arrives after its bytes. So the figures are the same on every machine, and show what "
        "waiting for others' layers costs, not what nodes that share expert nodes take from each other. Predicted is what decides over how many nodes a prompt is split.\n\n"
        + table(
            [
                "KV of a token and layer",
                "GB/s of a node",
                "prompt",
                "nodes",
                "s",
                "of one node",
                "predicted s",
            ],
            lines,
        )
    )


def overload() -> str:
    found = newest(rows("overload"), "places", "offered", "admission")
    if not found:
        return ""
    lines = [
        [
            row["places"],
            f"{row['offered']:g}",
            "yes" if row["admission"] else "no",
            f"{row['of_capacity']:.2f}",
            f"{row['worst_s'] / row['capacity_s']:.2f}",
            f"{row['refused']:.0%}",
            f"{row['taken_that_met']:.0%}",
            f"{row['slowest_check_cpu_ms']:.1f}",
        ]
        for row in found
    ]
    return (
        f"**Overload, with and without admission** ({where(found[-1])}); `python -m bench.overload --save`. The gateway's own code over scripted nodes; with 32 places a node prefill is the "
        "narrow pool, with 16 decode. Goodput of the capacity, on average and in the worst second.\n\n"
        + table(
            [
                "places",
                "of capacity",
                "admission",
                "goodput",
                "worst",
                "refused",
                "of taken on time",
                "slowest check ms",
            ],
            lines,
        )
    )


def _restored(row: Row) -> list[str]:
    return [
        row["shape"],
        f"{row['bytes'] / 2**20:,.0f}",
        f"{row['gb_s']['restore']:.2f}",
        f"{row['gb_s']['plain']:.2f}",
        f"{row['share']:.0%}",
    ]


def _from_host(row: Row) -> str:
    """Older rows say nothing of it."""
    return f"{row['ms']['host']:,.1f} ms from host memory, " if "host" in row["ms"] else ""


def restored() -> str:
    found = newest([row for row in rows("kv_tiers") if row["what"] == "restore"], "shape")
    lines = [[*_restored(row), row["by"]] for row in found]
    first = newest([row for row in rows("kv_tiers") if row["what"] == "first token"], "model", "tokens")
    told = [
        f"{row['model']}, {row['tokens']:,} tokens and 20 more: first token after {_from_host(row)}{row['ms']['disk']:,.1f} ms from the disk, {row['ms']['computed']:,.1f} ms computed "
        f"({where(row)}; `--first`)."
        for row in first
    ]
    memory = newest([row for row in rows("kv_tiers") if row["what"] == "host restore"], "shape")
    if not (lines or told or memory):
        return ""
    parts = []
    if memory:
        parts += [
            f"**KV from host memory** ({where(memory[-1])}); `python -m bench.kv_tiers --host --save`. Checked and copied into the cache, beside a plain copy of as many bytes in the "
            "same run.",
            table(
                ["shape", "MiB", "restored GB/s", "plain copy GB/s", "share"],
                [_restored(row) for row in memory],
            ),
        ]
    if lines:
        parts += [
            f"**KV from disk** ({where(found[-1])}); `python -m bench.kv_tiers --folder DIR --save`. Restored into the cache, beside a plain read of the same bytes in the same "
            "run. Aim: 90 %.",
            table(["shape", "MiB", "restored GB/s", "plain read GB/s", "share", "by"], lines),
        ]
    return "\n\n".join([*parts, *told])


def routing() -> str:
    found = newest([row for row in rows("kv_routing") if row["what"] == "trace"], "router", "nodes", "blocks")
    if not found:
        return ""
    order = sorted(found, key=lambda row: (row["nodes"], row["blocks"], _ROUTERS.index(row["router"])))
    lines = [
        [
            row["router"],
            f"{row['p50_s']:.2f}",
            f"{row['p99_s']:.2f}",
            f"{row['hits']:.0%}",
            f"{row['busy']:.0%}",
        ]
        for row in order
    ]
    return (
        f"**Finding KV** on the Mooncake conversation trace, {order[0]['nodes']} scripted nodes with {order[0]['blocks']:,} blocks of 512 tokens ({where(found[-1])}); `python -m bench.kv_routing --save`. "
        "At the rate at which round robin keeps nodes busy for 80 %. Hits are of one cache as large as all nodes' together.\n\n"
        + table(["router", "first token p50 s", "p99 s", "hits", "busy"], lines)
    )


def transfers() -> str:
    told = [row for row in rows("kv") if row["what"] == "transfer" and "share" in row]
    found = newest(told, "over", "shape", "bytes")
    if not found:
        return ""
    lines = [
        [
            row["over"],
            row["shape"],
            f"{row['bytes'] / 2**20:,.0f}",
            *(_figure(row["gb_s"], way, "{:.2f}") for way in ("kv", "copies", "stream", "memcpy")),
            f"{row['share']:.2f} ({row['share_spread'][0]:.2f} to {row['share_spread'][1]:.2f})",
        ]
        for row in found
    ]
    return (
        f"**KV blocks between two processes** ({where(found[-1])}); `python -m bench.kv_transfer --save`. GB/s, medians of turns with peers: over shared memory two processes that copy pieces "
        "into slots and out of them and do nothing else, over tcp a plain stream. Aims: 0.8 of the copies, 0.9 of the stream.\n\n"
        + table(["over", "blocks", "MiB", "KV", "copies", "stream", "memcpy", "of its peer"], lines)
    )


def mailboxes() -> str:
    found = newest(rows("mailboxes"), "kind", "node", "peers")
    if not found:
        return ""
    names = ("decode_mib", "prefill_mib", "decode_again_mib", "decode_limited_mib")
    lines = [
        [
            row["kind"],
            row["node"],
            row["peers"],
            f"{row['reserved_gib']:.1f}",
            *(_figure(row, name, "{:,.0f}") for name in names),
        ]
        for row in found
    ]
    return (
        f"**Memory of mailboxes**, DeepSeek-V3's shape with 512 rows ({where(found[-1])}); `python -m bench.mailboxes --save`. MiB resident after rounds of 8 rows, of 256, of 8 again, and of 8 once "
        "attention nodes only decode.\n\n"
        + table(
            ["transport", "node", "peers", "addresses GiB", "8 rows", "256 rows", "8 again", "8, limited"],
            lines,
        )
    )


def _figure(row: Row, name: str, form: str) -> str:
    return "" if row.get(name) is None else form.format(row[name])


SECTIONS = {
    "Decode beside prompts": phases,
    "A hand-over's part of the first token": handover,
    "A prompt on several prefill nodes": split,
    "Overload": overload,
    "KV blocks between attention nodes": transfers,
    "KV from disk": restored,
    "Finding KV": routing,
    "Memory of mailboxes": mailboxes,
}
