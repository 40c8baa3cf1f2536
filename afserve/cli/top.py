"""`afserve top`: the members of a running server, live: what each one does per second. Ctrl-C ends it."""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from afserve.cli.connection import connect, model_option, server_options
from afserve.cli.status import draft_lines, incident_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

Fields = Mapping[str, Any]  # parsed JSON
_INCIDENTS = 6
COLUMNS = ("node", "state", "MiB", "running", "waiting", "KV", "tokens/s", "rows/s", "busy")


@click.command()
@server_options
@model_option
@click.option("--every", default=1.0, show_default=True, type=click.FloatRange(0.1, 3600), help="Seconds.")
@click.option("--frames", type=click.IntRange(1), help="Stop after so many; without end if not given.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line each time instead of the table.")
def top(
    url: str, api_key_file: str | None, model: str | None, every: float, frames: int | None, as_json: bool
) -> None:
    """The members of a running server, live."""
    from rich.live import Live

    with connect(url, api_key_file, model) as client, ExitStack() as until_end:
        live = None if as_json else until_end.enter_context(Live(auto_refresh=False))
        before, shown = client.status(), 0
        last = time.monotonic()
        while frames is None or shown < frames:
            time.sleep(every)
            answer, now = client.status(), time.monotonic()
            if live is None:
                click.echo(json.dumps(record(answer, before, now - last)))
            else:
                live.update(frame(answer, before, now - last, live.console.width), refresh=True)
            before, last, shown = answer, now, shown + 1


def record(answer: Fields, before: Fields, seconds: float) -> dict[str, object]:
    """The table as JSON has it: cells that stay empty are left out."""
    nodes = {node["name"]: node for node in before["nodes"]}
    rows = [row(node, nodes.get(node["name"], node), seconds) for node in answer["nodes"]]
    return {
        "model": answer["model"]["id"],
        "epoch": answer["epoch"],
        "seconds": round(seconds, 3),
        "tokens_per_s": total(rows),
        "nodes": [
            {name: cell for name, cell in zip(COLUMNS, cells, strict=True) if cell != ""} for cells in rows
        ],
    }


def frame(answer: Fields, before: Fields, seconds: float, width: int) -> "RenderableType":
    """The table, and below it what drafts gave meanwhile and what the deployment went through last."""
    from rich.console import Group
    from rich.text import Text

    lines = [*draft_lines(answer, before), *incident_lines(answer, _INCIDENTS)]
    return Group(table(answer, before, seconds, width), *(Text(line, style="dim") for line in lines))


def table(answer: Fields, before: Fields, seconds: float, width: int) -> "RenderableType":
    """What changed in `seconds` since `before`, for rich to print."""
    from afserve.cli.columns import drawn

    nodes = {node["name"]: node for node in before["nodes"]}
    rows = [row(node, nodes.get(node["name"], node), seconds) for node in answer["nodes"]]
    title = f"{answer['model']['id']}  epoch {answer['epoch']}, {total(rows):,} tokens/s"
    cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in each] for each in rows]
    return drawn(title, COLUMNS, cells, width, left=("node", "state"))


def row(node: Fields, before: Fields, seconds: float) -> tuple[str | int, ...]:
    """Cells in the order of COLUMNS; those of other roles stay empty."""
    stats, old = node["stats"], before["stats"]
    common = (node["name"], node["state"], node["resident_bytes"] >> 20)
    if stats is None or old is None:  # a gateway counts in /metrics
        return (*common, *("",) * 6)
    if node["role"] == "attention":
        use = stats["kv_blocks_used"] / stats["kv_blocks"] if stats["kv_blocks"] else 0.0
        rate = round((stats["generated_tokens"] - old["generated_tokens"]) / seconds)
        return (*common, stats["running"], stats["waiting"], f"{use:.0%}", rate, "", "")
    rows = round((stats["rows"] - old["rows"]) / seconds)
    busy = min(1.0, (stats["busy_seconds"] - old["busy_seconds"]) / seconds)
    return (*common, "", "", "", "", rows, f"{busy:.0%}")


def total(rows: list[tuple[str | int, ...]]) -> int:
    column = COLUMNS.index("tokens/s")
    return sum(cells[column] for cells in rows if isinstance(cells[column], int))  # type: ignore[misc]
