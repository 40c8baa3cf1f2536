"""The planner against published tables and measured rows: every claim one row in `bench/results/planner.jsonl`.

    python -m bench.planner [--data ../shared/data/planner] [--quick | --speed | --drafts]

Failures are rows like the others. Predictions are deterministic; only the rows of `planner_speed.py` depend on
the machine, and `--speed` measures those alone; `--drafts` asks the rows that were measured with drafts alone.
"""

import argparse
import datetime
import json
import platform
import subprocess
from pathlib import Path

from bench import planner_silicon as silicon
from bench import planner_typed as typed
from bench.planner_drafts import CLAIM as DRAFTED
from bench.planner_drafts import drafted
from bench.planner_log import compare
from bench.planner_published import Check, megascale, step3_table
from bench.planner_speed import replace_rows, speeds

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"


def published() -> list[Check]:
    return [*step3_table(), *megascale()]


def as_row(check: Check) -> dict[str, object]:
    return {
        "claim": check.claim,
        "case": check.case,
        "published": check.published,
        "predicted": round(check.predicted, 5),
        "error": round(check.error, 4),
        "limit": check.limit,
        "passed": check.passed,
        "counted": check.counted,
        "note": check.note,
    }


def served(data: Path) -> list[dict[str, object]]:
    """Rows that no profile was fitted to: of the shipped profiles, and of five that leave out a fold each."""
    shipped, every = silicon.every_fold(data)
    rows = silicon.summaries(shipped, "served rows as typed, shipped profiles")
    silicon.plot(every, RESULTS / "planner_errors.png")
    rows += silicon.summaries(every, "measured configurations")
    log = compare(data / "llmservingsim_rtxpro6000_qwen3_30b_a3b")
    rows.append({"claim": "vLLM request log", "case": "Qwen3-30B-A3B, 2 RTX PRO 6000", **log})
    return rows


def markdown(path: Path) -> str:
    """The table of RESULTS.md: one line per claim, then every row that fell outside."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    checks = [row for row in rows if "published" in row and row["counted"]]
    sides = next(row for row in rows if row["claim"] == "verdicts as typed")
    lines = ["| claim | inside | worst | limit |", "| --- | --- | --- | --- |"]
    for claim in dict.fromkeys(row["claim"] for row in checks):
        mine = [row for row in checks if row["claim"] == claim]
        worst = max(mine, key=lambda row: abs(row["error"]) / (row["limit"] or 1e-9))
        inside = sum(row["passed"] for row in mine)
        lines.append(
            f"| {claim} | {inside} of {len(mine)} | {worst['case']}: {worst['error']:+.1%} | {worst['limit']:.0%} |"
        )
    lines += [
        "",
        f"Verdicts as typed: {sides['at_least_0.6']} of {sides['rows']} give the measured side at least 0.6, "
        f"{sides['wrong_above_0.7']} are wrong above 0.7, Brier score {sides['brier']}.",
        "",
        *(
            f"- {row['case']}: AFD measured better; planned so with {row['probability_afd']:.2f} ({row['note']})."
            for row in rows
            if row["claim"] == "consumer row as typed"
        ),
        "",
        "| measured rows, unseen in fitting | rows | TPOT error | TTFT error | inside the 80 % interval |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["claim"] == "measured configurations":
            ttft = f"{row['ttft_error']:.1%}" if row["ttft_error"] is not None else "-"
            line = f"| {row['case']} | {row['rows']} | {row['tpot_error']:.1%} | {ttft} | {row['inside_80']:.1%} |"
            lines.append(line)
        if row["claim"] == "vLLM request log":
            tpot, ttft = abs(row["tpot_median_error"]), abs(row["ttft_median_error"])
            lines.append(f"| {row['claim']}, medians | 300 | {tpot:.1%} | {ttft:.1%} | - |")
    lines += [
        "",
        "| measured with drafts, or beside such rows | rows | TPOT error | bias | inside the 80 % interval |",
    ]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in rows:
        if row["claim"] == DRAFTED:
            figures = f"{row['tpot_error']:.1%} | {row['bias']:+.1%} | {row['inside_80']:.1%}"
            lines.append(f"| {row['case']} | {row['rows']} | {figures} |")
    lines += ["", "| command | CPU s | wall s | limit of CPU s | |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        if row["claim"] == "speed":
            apart = f"{row['difference']:+.1%} from the closed form" if "difference" in row else ""
            seconds = f"{row['cpu_s']:.2f} | {row['median_s']:.2f} | {row['limit']:g}"
            lines.append(f"| {row['case']} | {seconds} | {apart} |")
    failed = [row for row in checks if not row["passed"]]
    lines += [
        "",
        *(f"Outside: {row['claim']}, {row['case']}: {row['error']:+.1%}. {row['note']}" for row in failed),
    ]
    return "\n".join(lines)


def stamp() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }


def show(checks: list[Check], others: list[dict[str, object]]) -> None:
    for claim in dict.fromkeys(check.claim for check in checks):
        mine = [check for check in checks if check.claim == claim and check.counted]
        if not mine:
            continue
        worst = max(mine, key=lambda check: abs(check.error) / (check.limit or 1))
        passed = sum(check.passed for check in mine)
        print(
            f"{claim}: {passed} of {len(mine)} inside; worst {worst.case}: {worst.error:+.1%} (limit {worst.limit:.0%})"
        )
    for check in checks:
        if not check.passed or check.claim == "megascale":
            mark = "ok  " if check.passed else "FAIL" if check.counted else "info"
            print(
                f"  {mark} {check.claim}: {check.case}: {check.predicted:,.4g} against {check.published:,.4g} "
                f"({check.error:+.1%}) {check.note}"
            )
    for row in others:
        print(
            "  " + ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("line", "split"))
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/planner")
    parser.add_argument("--table", action="store_true", help="print the results file as Markdown and stop")
    parser.add_argument("--quick", action="store_true", help="published numbers only, nothing written")
    parser.add_argument("--speed", action="store_true", help="time the commands alone and replace their rows")
    parser.add_argument("--drafts", action="store_true", help="ask rows with drafts alone and replace theirs")
    options = parser.parse_args()
    if options.table:
        print(markdown(RESULTS / "planner.jsonl"))
        return
    if options.speed:
        show([], replace_rows(RESULTS / "planner.jsonl", speeds(), stamp()))
        return
    if options.drafts:
        show([], replace_rows(RESULTS / "planner.jsonl", drafted(options.data), stamp()))
        return
    checks = published()
    sides, absolute = typed.published(options.data)
    if options.quick:
        show(checks, [*sides, *absolute])
        return
    others = [*sides, *absolute, *served(options.data), *drafted(options.data)]
    others += speeds()
    show(checks, others)
    RESULTS.mkdir(exist_ok=True)
    mark = stamp()
    with (RESULTS / "planner.jsonl").open("w") as file:
        for row in [*map(as_row, checks), *others]:
            file.write(json.dumps(row | mark) + "\n")


if __name__ == "__main__":
    main()
