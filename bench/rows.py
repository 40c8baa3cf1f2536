"""Rows of bench/results as values, and a Markdown table of them. It knows no benchmark."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
Row = Mapping[str, Any]


def rows(name: str) -> list[Row]:
    path = RESULTS / f"{name}.jsonl"
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def runs_with(found: Iterable[Row], transport: str) -> list[Row]:
    """Rows of those runs that measured `transport` too: a peer beside it is of the same machine and hour."""
    run = lambda row: tuple(row[key] for key in ("machine", "commit", "date", "load"))  # noqa: E731
    kept = list(found)
    wanted = {run(row) for row in kept if row.get("transport") == transport}
    return [row for row in kept if run(row) in wanted]


def newest(found: Iterable[Row], *keys: str) -> list[Row]:
    """The last row of each kind, in the order in which kinds first came."""
    kept: dict[tuple[Any, ...], Row] = {}
    for row in found:
        kept[tuple(str(row.get(key)) for key in keys)] = row
    return list(kept.values())


def table(head: list[str], lines: Iterable[Iterable[object]]) -> str:
    drawn = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*drawn, *("| " + " | ".join(map(str, line)) + " |" for line in lines)])


def where(row: Row) -> str:
    load = f", load average {row['load']}" if "load" in row else ""
    return f"{row['machine']}{load}, {row['date'][:10]}"
