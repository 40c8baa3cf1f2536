"""A table of pilots on simulated days beside others that size pools, rendered from rows. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from bench.rows import Row, newest, rows, table, where

_SIZERS = ("pilot", "oracle", "fixed", "replicas")


def pilot() -> str:
    found = newest(rows("pilot"), "case", "trace", "pool", "slower", "seed")
    if not found:
        return ""
    return (
        "**Simulated**: stage times of the planner, lengths of the public traces; a day is made by a stated rule (`control/pilot/replay/days`), nothing is measured of the "
        "machine that plays it. `python -m bench.pilot --save`; [what it is](../docs/size-pools.md). In time: requests within both targets. Sought were 0.99 of the oracle's, at most 1.15 of its device "
        "hours, 0.75 of those of the best fixed sizes, and at most one change in ten minutes. Fixed: the fewest devices that serve 0.99 of the oracle's in time, of sizes planned for a rate. Replicas: whole ones "
        "by requests in each, which serve 240 s after they were asked for, and may be more than the pool has. Intervals are to hold in 80 %. Bursty: 24 bursts a day of twice the rate for 2 to 8 minutes, five "
        "minutes with a variation of 0.15, times between arrivals of a Gamma distribution with one of 2; changes beside bursts are those outside of the time from a burst's beginning until 12 minutes behind its end.\n\n"
        + table(
            ["case", "seed", "trace", "pool", "TTFT, TPOT", "slower than the model", "in time: pilot", "oracle", "fixed", "replicas",
             "device hours: pilot", "oracle", "fixed", "replicas", "attainment / oracle", "hours / oracle", "/ fixed", "changes in 10 min", "beside bursts", "intervals held"],
            map(_line, found),
        )
        + _classes(found)
    )  # fmt: skip


def _classes(found: list[Row]) -> str:
    parts = [
        [
            row["case"],
            row["seed"],
            row["pool"],
            name,
            f"{one['share']:.0%}",
            *(f"{one[who]:.2%}" for who in _SIZERS),
            f"{one['pilot'] / one['oracle']:.3f}",
        ]
        for row in found
        for name, one in row.get("classes", {}).items()
    ]
    if not parts:
        return ""
    head = ["case", "seed", "pool", "class", "of requests", "in time: pilot", "oracle", "fixed", "replicas"]
    return "\n\nOf these, by class of service:\n\n" + table([*head, "attainment / oracle"], parts)


def _line(row: Row) -> list[object]:
    held, beside = row["intervals"], row.get("changes_beside_bursts_in_10_minutes")
    return [
        row["case"],
        row.get("seed", "-"),
        row["trace"],
        row["pool"],
        f"{row['ttft']}, {row['tpot']}",
        row["slower"],
        *(f"{row[name]['attainment']:.2%}" for name in _SIZERS),
        *(f"{row[name]['device_hours']:,.0f}" for name in _SIZERS),
        f"{row['attainment_of_oracle']:.3f}",
        f"{row['hours_of_oracle']:.2f}",
        f"{row['hours_of_fixed']:.2f}",
        f"{row['changes_in_10_minutes']:.2f}",
        "-" if beside is None else f"{beside:.2f}",
        f"{held['held']} of {held['compared']}",
    ]


def live() -> str:
    found = newest(({"hold": 6.0, **row} for row in rows("pilot_live")), "case", "kills", "hosts", "hold")
    if not found:
        return ""
    whole = list({(row["kills"], row["hosts"], row["hold"]): row for row in found}.values())
    return (
        f"**Live**: nano, {where(found[-1])}; `python -m bench.pilot_live --save`, also with `--kills` and `--hosts`. Two cores run all processes, so that more nodes are no faster: it shows that pools follow, and "
        "what clients notice, not what is gained. Followed: seconds from the decision until as many nodes serve as it says; a dash where the pilot said something else before.\n\n"
        + table(
            ["load", "prompts + answers a second", "killed", "hosts", "--pilot-hold, s", "pools at first", "at most", "at last", "changes", "followed after, s", "gap p50, p99 ms"],
            map(_live_line, found),
        )
        + "\n\n"
        + table(
            ["killed", "hosts", "--pilot-hold, s", "requests", "failed", "altered", "advices", "intervals held"],
            [["one in each case" if row["kills"] else "nobody", row["hosts"], f"{row['hold']:g}", row["requests"], row["failed"], row["altered"], row.get("advised", "-"), f"{row['held']} of {row['compared']}"] for row in whole],
        )
    )  # fmt: skip


def _live_line(row: Row) -> list[object]:
    sizes = (":".join(map(str, row[name].values())) for name in ("first", "most", "last"))
    return [
        row["case"],
        f"{row['prompts_per_s']:g} + {row['answers_per_s']:g}",
        row["killed"],
        row["hosts"],
        f"{row['hold']:g}",
        *sizes,
        row["changes"],
        ", ".join("-" if one is None else f"{one:g}" for one in row["followed_s"]),
        f"{row['gap_p50_ms']:g}, {row['gap_p99_ms']:g}",
    ]
