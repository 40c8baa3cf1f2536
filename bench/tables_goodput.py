"""A table of simulated goodput by layout of prefill and decode, rendered from rows. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from bench.rows import Row, newest, rows, table

CASE = ("model", "chip", "devices", "trace", "ttft_s", "tpot_s")
OURS = "shared", "shared on every device"
TWO_COPIES, MIXED = "P/D, two copies", "mixed, chunked prefill"
Cell = dict[str, Row]


def goodput() -> str:
    """Rows whose layout names a way of cutting prompts are older: an engine on a GPU does not cut so."""
    found = newest(rows("goodput"), *CASE, "layout")
    cases: dict[tuple[object, ...], Cell] = {}
    for row in found:
        cases.setdefault(tuple(row[key] for key in CASE), {})[row["layout"]] = row
    whole = [case for case in cases.values() if {*OURS, TWO_COPIES, MIXED} <= case.keys()]
    if not whole:
        return ""
    return (
        "**Simulated**: models in FP8, stage times of the planner, the first requests of two traces sped up or slowed; nothing is "
        "measured of the machine that plays it. Each is the best of its kind over splits, chunks, instances and ranks; `python -m bench.goodput --save`. "
        "Requests per second of which 90 % meet both targets. *On every device*: each has an expert node and an attention node; that decoding goes "
        "first there is assumed. Expert nodes keep prompts in a queue that decoding goes before whenever a thread block ends; a layer of decoding waits for two blocks, 52 us each "
        f"on an H200. That was not measured on a GPU. Shared experts were to reach 1.5 of P/D and 1.3 of mixed. {_counted(whole)}\n\n"
        + table(
            ["model", "devices", "trace", "requests", "TTFT, TPOT", "shared experts", "on every device",
             "P/D, two copies", "mixed, chunked prefill", "shared / P/D", "/ mixed", "best shared layout"],
            map(_line, whole),
        )
    )  # fmt: skip


def _counted(whole: list[Cell]) -> str:
    """How often the best of shared experts reach what was asked, and how often they win."""
    pairs = [(_of(case, TWO_COPIES), _of(case, MIXED)) for case in whole]
    copies, mixed = (sum(pair[i] >= aim for pair in pairs) for i, aim in ((0, 1.5), (1, 1.3)))
    both, aims = sum(min(pair) > 1 for pair in pairs), sum(a >= 1.5 and b >= 1.3 for a, b in pairs)
    return (
        f"Of {len(pairs)} cases {copies} reach the first and {mixed} the second, {aims} both; {both} are better than both others. "
        "Where another layout does not fit, its aim counts as reached."
    )


def _best(case: Cell) -> Row:
    return max((case[name] for name in OURS), key=lambda row: float(row["requests_s"]))


def _of(case: Cell, other: str) -> float:
    """The best of shared experts over another layout; infinite where that one serves nothing."""
    mine, theirs = _best(case)["requests_s"], case[other]["requests_s"]
    return mine / theirs if theirs else float("inf") if mine else 0.0


def _line(case: Cell) -> list[object]:
    row = _best(case)
    return [
        row["model"],
        f"{row['devices']} {row['chip']}",
        row["trace"],
        f"{row['requests']:,}",
        f"{row['ttft_s']:g} s, {1e3 * row['tpot_s']:g} ms",
        *(_rate(case[name]) for name in (*OURS, TWO_COPIES, MIXED)),
        *(f"{_of(case, other):.2f}" if case[other]["requests_s"] else "" for other in (TWO_COPIES, MIXED)),
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
