"""Tables of what agents find again: the hour in virtual time, what is computed ahead, another host's disk. It measures
nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from bench.rows import newest, rows, table, where

SAID = ("hints", "behind", "ahead")
SECONDS = ("p50_s", "p90_s", "p99_s", "side_p90_s")


def agents() -> str:
    return "\n\n".join(filter(None, (_hour(), _ahead(), _elsewhere())))


def _hour() -> str:
    found = newest([{"behind": False, **row} for row in rows("agent_hour")], "scene", "seconds", *SAID)
    if not found:
        return ""
    silent = {(row["scene"], row["seconds"], row["commit"]): row for row in found if not row["hints"]}
    lines = []
    for row in found:
        said = ", ".join(name for name in SAID if row.get(name)) or "none"
        other = silent.get((row["scene"], row["seconds"], row["commit"]))
        ratio = f"{row['p90_s'] / other['p90_s']:.2f}" if other and row["hints"] else ""
        seconds = [f"{row[name]:.2f}" if name in row else "" for name in SECONDS]
        minutes = f"{row['seconds'] / 60:g}"
        lines.append(
            [row["scene"], said, minutes, f"{row['turns']:,}", f"{row['found']:.1%}", *seconds, ratio]
        )
    return (
        "**50 agents in virtual time** over the product's cache, tiers, names, pulls and routing; a node restarts after a third of the time and everything after two. "
        f"Times are of a machine that is said in the bench, seconds. `python -m bench.agent_hour --save`, {found[-1]['date'][:10]}. "
        "Aims: 90 % found, 70 % where the cache holds a third; P90 of the first token at most 0.5 of that without hints. New words of each turn are some 5.5 % of its prompt.\n\n"
        + table(
            [
                "the nodes' caches",
                "said",
                "minutes",
                "turns",
                "prompt tokens found",
                "first token p50",
                "p90",
                "p99",
                "side requests p90",
                "p90 / none",
            ],
            lines,
        )
    )


def _ahead() -> str:
    found = newest(rows("warm_ahead"), "what", "how")
    if not found:
        return ""
    return (
        f"**Computed ahead** (`--warm-ahead`; {where(found[-1])}); `python -m bench.warm_ahead --save`. First tokens of the bundled model on one node. Aims: a next turn's at most 0.6 of without; "
        "p99 of requests that wait within 2 %.\n\n"
        + table(
            ["what", "how", "first token p50 ms", "p99 ms", "tokens to compute"],
            [
                [row["what"], row["how"], row["p50_ms"], row.get("p99_ms", ""), row.get("tokens", "")]
                for row in found
            ],
        )
    )


def _elsewhere() -> str:
    found = newest([row for row in rows("kv_tiers") if row["what"] == "elsewhere"], "link", "tokens")
    if not found:
        return ""
    return (
        f"**On another host's disk alone** ({where(found[-1])}; two network namespaces, the bundled model); `python -m bench.kv_elsewhere --save`. First tokens beside computing as long a prompt. "
        "Aims: at most 0.5 where the link allows, never more than 1.05.\n\n"
        + table(
            [
                "link",
                "tokens",
                "found",
                "pulled ms",
                "computed ms",
                "ratio",
                "worst",
                "the first, unmeasured one",
            ],
            [
                [
                    row["link"],
                    row["tokens"],
                    f"{row['found']:g}",
                    row["pulled_ms"],
                    row["computed_ms"],
                    row["of_computing"],
                    row["worst_of_computing"],
                    row["first_of_computing"],
                ]
                for row in found
            ],
        )
    )
