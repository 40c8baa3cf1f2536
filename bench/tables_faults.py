"""Tables of what clients notice of faults, rendered from rows. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from bench.rows import Row, newest, rows, table, where


def nodes() -> str:
    found = newest(rows("faults"), "case")
    if not found:
        return ""
    lines = [
        [
            row["case"],
            row["faults"],
            f"{row['failed']}, {row['altered']} of {row['requests']:,}",
            f"{row['stall_p50_ms']:,.0f} / {row['stall_p99_ms']:,.0f}",
            f"{row['undisturbed_p50_ms']:,.0f} / {row['undisturbed_p99_ms']:,.0f}",
            f"{row['back_ms']:,.0f}",
            f"{row['throughput_after']:.2f}",
        ]
        for row in found
    ]
    return (
        f"**Nodes that are killed and stopped under load**, nano on 2x3, {found[0]['rate']:g} greedy streams of {found[0]['tokens']} tokens begin "
        f"per second ({where(found[-1])}); `python -m bench.faults --save`. A stall is the longest wait for a token of a stream that was open "
        "when the node was broken, beside it the same at moments of the same run in which nothing happened.\n\n"
        + table(
            [
                "what happens",
                "times",
                "failed, altered",
                "stall p50 / p99 ms",
                "undisturbed",
                "all serve again, ms",
                "tokens/s after / before",
            ],
            lines,
        )
    )


def networks() -> str:
    found = newest(rows("faults_networks"), "case")
    if not found:
        return ""
    lines = [
        [
            row["case"],
            f"{row['failed']}, {row['altered']} of {row['requests']:,}",
            f"{row['stall_p50_ms']:,.0f} / {row['stall_p99_ms']:,.0f}",
            f"{row['undisturbed_p50_ms']:,.0f} / {row['undisturbed_p99_ms']:,.0f}",
            f"{row['token_ms']:,.1f} ({row['token_undisturbed_ms']:,.1f})",
            ", ".join(f"{ms:,.0f}" for ms in row["noticed_ms"]) or "nobody is lost",
        ]
        for row in found
    ]
    return (
        "**Two hosts as network namespaces**, an attention and an expert node on each, every expert on both "
        f"({where(found[-1])}); `python -m bench.faults --networks --save`. Each spell lasts {found[0]['seconds']:g} s or more.\n\n"
        + table(
            [
                "what happens",
                "failed, altered",
                "stall p50 / p99 ms",
                "undisturbed",
                "ms a token (before)",
                "loss noticed after ms",
            ],
            lines,
        )
    )


def changes() -> str:
    found = newest(rows("faults_changes"), "case")
    if not found:
        return ""
    lines = [
        [
            row["case"],
            row["turns"],
            f"{row['stall_p50_ms']:,.0f} / {row['stall_max_ms']:,.0f}",
            f"{row['undisturbed_p50_ms']:,.0f} / {row['undisturbed_max_ms']:,.0f}",
            f"{row['took_ms']:,.0f}",
        ]
        for row in found
    ]
    last = found[-1]
    return (
        f"**Nodes that come, go and change while they serve**, nano on 2x3 ({where(last)}); `python -m bench.faults --changes --save`. Of "
        f"{last['requests']:,} requests {last['failed']} failed and {last['altered']} had other tokens.\n\n"
        + table(["what changes", "times", "stall p50 / longest ms", "undisturbed", "done after ms"], lines)
    )


def survival() -> str:
    """What is lost alone and together with others, by transport, with busy loops beside it."""
    found = newest(rows("faults_survival"), "transport", "busy", "case")
    if not found:
        return ""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row["busy"], row["transport"]), []).append(row)
    lines = [
        [
            transport,
            busy,
            f"{min(row['load'] for row in group):.0f} to {max(row['load'] for row in group):.0f}",
            len(group),
            f"{sum(row['requests'] for row in group):,}",
            sum(row["failed"] for row in group),
            sum(row["altered"] for row in group),
            f"{max(row['longest_gap_s'] for row in group):.1f}",
            f"{max(row['whole_s'] for row in group):.1f}",
        ]
        for (busy, transport), group in groups.items()
    ]
    failed = ", ".join(f"{row['case']} over {row['transport']}" for row in found if row["failed"])
    machines = "; ".join(sorted({row["machine"] for row in found}))
    return (
        f"**What is lost, alone and with others**, on prefill, decode and expert nodes of nano on two cores ({machines}, up to {found[-1]['date']}); "
        "`python -m bench.faults --survival --transports shm,tcp,dist,pairs --busy N --save`. Transports with 16 and 32 busy loops on the machine ran side by side, four deployments "
        "at once beside builds and test runs. The longest gap between two tokens of a request and the time until everything is there again, in seconds; nodes are stopped for up to 30 s. "
        + (f"Failed: {failed}. " if failed else "")
        + "\n\n"
        + table(
            [
                "transport",
                "busy loops",
                "load average",
                "cases",
                "requests",
                "failed",
                "altered",
                "longest gap",
                "whole after",
            ],
            lines,
        )
    )


def cost_and_soak() -> str:
    cost = newest(rows("faults_cost"), "bench")
    soak = newest([{"busy": 0, "draft": "off", **row} for row in rows("faults_soak")], "busy", "draft")
    copies = newest([row for row in rows("kv") if row["what"] == "copies"], "what")
    share = newest([row for row in rows("pipeline") if "survivors_share" in row], "experiment")
    return "\n\n".join([*map(_cost, cost), *map(_copies, copies), *map(_share, share), *map(_soak, soak)])


def overloaded() -> str:
    return "\n\n".join(map(_overloaded, newest(rows("overloaded_host"), "loops", "cores")))


def _overloaded(row: Row) -> str:
    lost = ", ".join(f"{count} of {name}" for name, count in row["lost"].items()) or "none"
    return (
        f"**{row['loops']} busy loops beside nano on {row['cores']} cores** for {row['seconds'] / 60:g} minutes ({where(row)}); `python -m bench.overloaded_host --save`. Of {row['requests']:,} streams "
        f"{row['failed']} failed and {row['altered']} had other tokens; lost nodes: {lost}. Of each stream's longest waits for a token the median was {row['median_longest_wait_s']:.1f} s, the longest {row['longest_wait_s']:.1f} s."
    )


def _cost(row: Row) -> str:
    low, high = row["p99_ratio_95"]
    return (
        f"**While nothing is lost**, {row['pairs']} pairs of {row['seconds']:g} s in turns with `--on-loss end` ({where(row)}); "
        f"`python -m bench.faults --cost --save`: {row['throughput_ratio']:.3f} of the tokens per second (median of pairs), "
        f"{row['p99_ratio']:.2f} of the 99th percentile between tokens ({low:.2f} to {high:.2f} in 95 of 100 resampled runs)."
    )


def _copies(row: Row) -> str:
    return (
        f"**Copies of KV blocks at another node**, `--kv-copies 1`, {row['pairs']} pairs in turns ({where(row)}); `python -m bench.kv --copies "
        f"{row['pairs']} --save`: {row['median']:.3f} of the tokens per second without (median of pairs, {row['low']:.3f} to {row['high']:.3f})."
    )


def _share(row: Row) -> str:
    low, high = row["after_spread"]
    return (
        f"**What survivors make**, {row['nodes']} with scripted stages, each expert on two nodes, one expert node killed {row['kills']} times and "
        f"not started again ({where(row)}); `python -m bench.pipeline_losses --save`: from 5 s after on {row['after']:.3f} of the layers per "
        f"second before ({low:.3f} to {high:.3f}), where {row['survivors_share']:.3f} of the nodes are left."
    )


def _soak(row: Row) -> str:
    lines = [
        [name.replace("_", " "), *row[name]]
        for name in (
            "memory_mib",
            "descriptors",
            "threads",
            "processes",
            "shared_segments",
            "kv_in_use",
            "requests_open",
        )
    ]
    mixed = sum(row.get("mixed", {}).values())
    kind = " --mixed" if mixed else "" if row["arrivals"] == "poisson" else " --arrivals FILE"
    busy = f" --busy {row['busy']}" if row["busy"] else ""
    beside = f", beside {row['busy']} busy loops" if row["busy"] else ""
    draft = f" --draft {row['draft']}" if row["draft"] != "off" else ""
    return (
        f"**{row['seconds'] / 60:g} minutes under {sum(row['faults'].values())} seeded faults**, {row['rate']:g} requests begin per second "
        f"as in {row['arrivals']}{beside} ({where(row)}); `python -m bench.faults --soak MINUTES{kind}{busy}{draft} --save`. Of {row['requests']:,} requests "
        f"{row['answered']:,} were answered, {row['cancelled']:,} cancelled, {row['failed']} failed, {row['twice']} answered twice; "
        f"{row['altered']} of {row['compared']:,} greedy ones had other tokens; {row['preemptions']:,.0f} preemptions."
        + (f" {row['accepted_drafts']:,.0f} tokens of drafts were right." if draft else "")
        + (
            f" Beside them {mixed:,} requests of every other kind, {sum(row['mixed_wrong'].values())} answered wrongly."
            if mixed
            else ""
        )
        + "\n\n"
        + table(["all processes, idle", "after the first faults", "at the end"], lines)
    )
