"""A table of simulated goodput by layout of prefill and decode, rendered from rows. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from bench.rows import Row, newest, rows, table

CASE = ("model", "chip", "devices", "trace", "ttft_s", "tpot_s")
SHARED, BY_ROWS, TWO_COPIES, MIXED = (
    "shared, pieces at tiles", "shared, pieces of rows", "P/D, two copies", "mixed, chunked prefill"
)  # fmt: skip


def goodput() -> str:
    found = newest(rows("goodput"), *CASE, "layout")
    cases: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in found:
        cases.setdefault(tuple(row[key] for key in CASE), {})[row["layout"]] = row
    whole = [case for case in cases.values() if case.keys() == {SHARED, BY_ROWS, TWO_COPIES, MIXED}]
    if not whole:
        return ""
    return (
        f"**Simulated**: DeepSeek-V3 in FP8, stage times of the planner, the first requests of two traces sped up or slowed; nothing is "
        "measured of the machine that plays it. Each is the best of its kind over splits, chunks, instances and ranks; `python -m bench.goodput --save`. "
        "Requests per second of which 90 % meet both targets. Shared experts were to reach 1.5 of P/D and 1.3 of mixed: "
        f"{_won(whole)}\n\n"
        + table(
            ["devices", "trace", "requests", "TTFT, TPOT", "shared, pieces of rows", "at tiles", "P/D, two copies", "mixed, chunked prefill",
             "shared / P/D", "shared / mixed", "best shared layout"],
            map(_line, whole),
        )
    )  # fmt: skip


def _won(whole: list[dict[str, Row]]) -> str:
    """How often shared experts, as they are now, reach what was asked, and how often they win."""
    pairs = [(_of(case, TWO_COPIES), _of(case, MIXED)) for case in whole]
    copies, mixed = (sum(pair[i] >= aim for pair in pairs) for i, aim in ((0, 1.5), (1, 1.3)))
    both = sum(min(pair) > 1 for pair in pairs)
    return f"of {len(pairs)} cases {copies} and {mixed} do; {both} are better than both. Where P/D does not fit, it counts as reached."


def _of(case: dict[str, Row], other: str) -> float:
    """Shared experts over another layout; infinite where that one serves nothing."""
    mine, theirs = case[BY_ROWS]["requests_s"], case[other]["requests_s"]
    return mine / theirs if theirs else float("inf") if mine else 0.0


def _line(case: dict[str, Row]) -> list[object]:
    row = case[SHARED]
    return [
        f"{row['devices']} {row['chip']}",
        row["trace"],
        f"{row['requests']:,}",
        f"{row['ttft_s']:g} s, {1e3 * row['tpot_s']:g} ms",
        *(_rate(case[name]) for name in (BY_ROWS, SHARED, TWO_COPIES, MIXED)),
        *(_ratio(_of(case, other)) for other in (TWO_COPIES, MIXED)),
        row["best"],
    ]


def _rate(row: Row) -> str:
    return (
        f"{row['requests_s']:.1f}"
        if row["requests_s"]
        else "does not fit"
        if row["best"] == "does not fit"
        else "none"
    )


def _ratio(value: float) -> str:
    return "" if value == float("inf") else f"{value:.2f}"
