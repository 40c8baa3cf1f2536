"""Tables of the planner, rendered from rows. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

import statistics

from bench.planner import markdown
from bench.planner_self import kind
from bench.rows import RESULTS, Row, newest, rows, table, where


def published() -> str:
    path = RESULTS / "planner.jsonl"
    if not path.exists():
        return ""
    return (
        "**Planner** against published tables and measured rows; `python -m bench.planner`.\n\n"
        + markdown(path)
    )


def itself() -> str:
    measured = newest([r for r in rows("planner_self") if "tpot_ms" in r], "model", "isa", "case")
    kinds = dict.fromkeys((r["model"], r["isa"]) for r in measured)
    return "\n\n".join(_of_model([r for r in measured if (r["model"], r["isa"]) == one]) for one in kinds)


def _of_model(found: list[Row]) -> str:
    lines = [
        [
            r["case"],
            f"{r['tpot_ms']:.1f}",
            f"{r['predicted_tpot_ms']:.1f}",
            f"{r['tpot_error']:+.0%}",
            f"{r['tok_s_error']:+.0%}",
            f"{r['low']:,.0f} to {r['high']:,.0f}",
            *([f"{r['pace']:.2f}"] if r.get("pace") else []),
        ]
        for r in found
    ]
    kinds, rounds = [], found[-1]["rounds"]
    for one in dict.fromkeys(kind(r) for r in found):
        mine = [r for r in found if kind(r) == one]
        errors = (statistics.median(abs(r[key]) for r in mine) for key in ("tpot_error", "tok_s_error"))
        kinds.append("{} TPOT {:.1%}, throughput {:.1%}".format(one, *errors))
    apart = statistics.median((r["high"] - r["low"]) / 2 / r["tok_s"] for r in found)
    pace = (
        " Pace: how many times as long the same work took around the runs as in the calibrations; times of runs are divided by it."
        if any(r.get("pace") for r in found)
        else ""
    )
    return (
        f"**afserve itself, as `afserve plan` says and as it runs** ({found[-1]['model']}, {found[-1]['isa']}, {where(found[-1])}); {rounds} round{'s' * (rounds != 1)} of a short "
        f"calibration and of runs, medians: `python -m bench.planner_self`. Median absolute errors: {'; '.join(kinds)} (aim: 10 %). "
        f"Rates of the same run differ by {apart:.0%} to either side between rounds, in the median.{pace}\n\n"
        + table(
            [
                "layout",
                "TPOT ms",
                "predicted",
                "error",
                "error of tok/s",
                "tok/s by round",
                *(["pace"] * bool(pace)),
            ],
            lines,
        )
    )
