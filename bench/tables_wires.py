"""Tables of round trips over each transport, rendered from rows. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from bench.rows import newest, rows, runs_with, table, where


def m2n() -> str:
    found = newest(
        [r for r in runs_with(rows("m2n"), "dist") if "p50_us" in r], "transport", "bytes", "pairs", "cores"
    )
    wanted = [r for r in found if r["pairs"] == "1x1" and r["cores"] == "quiet"]
    if not wanted:
        return ""
    sizes = sorted({r["bytes"] for r in wanted})
    by = {(r["transport"], r["bytes"]): r for r in wanted}
    wires = list(dict.fromkeys(r["transport"] for r in wanted))
    cell = lambda w, b: f"{by[w, b]['p50_us']:,.0f} / {by[w, b]['p99_us']:,.0f}" if (w, b) in by else ""  # noqa: E731
    return (
        f"**Round trips, 1:1** ({where(wanted[-1])}). p50 / p99 in us by bytes each way; `python -m bench.m2n`.\n\n"
        + table(
            ["transport", *(f"{b // 1024} KiB" for b in sizes)],
            [[w, *(cell(w, b) for b in sizes)] for w in wires],
        )
    )


def hosts() -> str:
    found = newest(runs_with(rows("m2n_hosts"), "dist"), "transport", "bytes", "pairs")
    found = [r for r in found if "p50_us" in r]
    if not found:
        return ""
    sizes = sorted({(r["pairs"], r["bytes"]) for r in found})
    by = {(r["transport"], r["pairs"], r["bytes"]): r for r in found}
    wires = list(dict.fromkeys(r["transport"] for r in found))
    cell = lambda key: f"{by[key]['p50_us']:,.0f} / {by[key]['p99_us']:,.0f}" if key in by else ""  # noqa: E731
    return (
        f"**Round trips between two network namespaces as hosts** ({where(found[-1])}). p50 / p99 in us; `python -m bench.m2n_hosts`.\n\n"
        + table(
            ["transport", *(f"{pairs}, {b // 1024} KiB" for pairs, b in sizes)],
            [[w, *(cell((w, *size)) for size in sizes)] for w in wires],
        )
    )


def pairs() -> str:
    """`--transport pairs` beside the one transport that a pair of nodes would take by itself."""
    drawn = []
    for name, what, peer in (
        ("m2n", "inside a host", "shm"),
        ("m2n_hosts", "between two network namespaces", "tcp"),
    ):
        found = [r for r in runs_with(rows(name), "pairs") if r.get("pairs") == "1x1" and "p50_us" in r]
        if not found:
            continue
        by = {(r["transport"], r["bytes"]): r["p50_us"] for r in newest(found, "transport", "bytes")}
        sizes = sorted({size for wire, size in by if wire == "pairs"})
        drawn.append(
            f"**`--transport pairs` {what}** ({where(found[-1])}). p50 in us of a round trip, 1:1; `python -m bench.{name} --wires {peer},pairs`.\n\n"
            + table(
                ["transport", *(f"{size // 1024} KiB" for size in sizes)],
                [
                    *([wire, *(f"{by[wire, size]:,.0f}" for size in sizes)] for wire in (peer, "pairs")),
                    ["ratio", *(f"{by['pairs', size] / by[peer, size]:.2f}" for size in sizes)],
                ],
            )
        )
    return "\n\n".join(drawn)
