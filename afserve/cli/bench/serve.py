"""`afserve bench serve`: load on any OpenAI-compatible server, closed or open, and what its clients see of it.

Each run is a row with machine, commit and date, or a column of a table.
"""

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click

from afserve.cli.bench.report import measured_here
from afserve.cli.bench.serve_options import LoadOptions, Loop, ReportOptions
from afserve.cli.connection import first_model, key_of, server_options
from afserve.cli.load.arrivals import arrivals, read_trace, scaled
from afserve.cli.load.asks import RequestForm, from_file, generated
from afserve.cli.load.connection import ConnectionPool, Server
from afserve.cli.load.figures import LoadFigures, figures, read_slo
from afserve.cli.load.loops import LoadPlan, Ran, Watch, run
from afserve.cli.load.picture import draw
from afserve.cli.options import group_options
from afserve.errors import PeerLost


def record(
    url: str, form: RequestForm, turn: Loop, load: LoadOptions, found: LoadFigures
) -> dict[str, object]:
    """The row as it goes into a results file."""
    return {
        "bench": "serve",
        "url": url,
        "model": form.model,
        "endpoint": form.endpoint,
        "loop": turn.kind,
        "concurrency": turn.concurrency[0] if turn.kind == "closed" else None,
        "rate": turn.rate_of,
        "trace": None if turn.trace is None else turn.trace.name,
        "prompts": None if load.prompts is None else load.prompts.name,
        "input_len": load.input_len,
        "output_len": load.output_len,
        "seed": load.seed,
        **found.row(),
        **measured_here(os.cpu_count()),
    }


def table(names: Sequence[str], found: Sequence[LoadFigures]) -> object:
    """A column per turn, a line per figure."""
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("")
    for name in names:
        drawn.add_column(name, justify="right")
    for line in zip(*(_lines(one) for one in found), strict=True):
        drawn.add_row(line[0][0], *(text for _, text in line))
    return drawn


def _lines(one: LoadFigures) -> list[tuple[str, str]]:
    refused = f", {one.refused} refused" if one.refused else ""
    failed = f", {one.failed} failed" if one.failed else ""
    lines = [
        ("requests answered", f"{one.completed} of {one.sent}{refused}{failed}"),
        ("requests/s", _number(one.requests_per_s)),
        ("generated tokens/s", _number(one.tokens_per_s)),
        ("prompt tokens, mean", _number(one.prompt_tokens / max(1, one.completed))),
    ]
    for name, spread in (
        ("first token", one.ttft_ms),
        ("between tokens", one.itl_ms),
        ("per token", one.tpot_ms),
        ("whole answer", one.e2e_ms),
    ):
        values = " / ".join(_number(value) for value in (spread.p50, spread.p90, spread.p99))
        lines.append((f"{name}, ms, p50 / p90 / p99", values))
    if one.good is not None:
        lines.append(("within the SLO", f"{one.good} of {one.sent}, {_number(one.goodput_per_s)}/s"))
    client = one.client
    lines.append(("client's own CPU, us per token", _number(client["cpu_us_per_token"])))
    lines.append(("  of one core, %", _number(client["core_share"] * 100)))
    lag = f"{_number(client['late_ms_p99'])} / {_number(client['lag_ms_p99'])}"
    return [*lines, ("  sent late / read late, ms, p99", lag)]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


@click.command()
@group_options(Loop, LoadOptions, ReportOptions)
@server_options
def serve(loop: Loop, load: LoadOptions, report: ReportOptions, url: str, api_key_file: str | None) -> None:
    """Load on a running server, and what its clients see: TTFT, time between tokens, goodput.

    Closed loop: --concurrency streams, the next request when one ends. Open loop: --rate requests per second, or the
    arrivals of --trace, whether or not earlier answers have come. Several rates or concurrencies are run in turn.

    The server may be any that speaks OpenAI's API and streams. Times are taken as bytes arrive, before they are parsed;
    what the client itself costs is told beside them.

    \b
    Examples:
      afserve bench serve --concurrency 1,8,32 --requests 64
      afserve bench serve --rate 4 --arrivals bursts --slo ttft=500ms,tpot=50ms --plot load.png
      afserve bench serve --url http://127.0.0.1:8080 --trace conversation.jsonl --rate 2 --json
    """
    loop.check()
    slo = read_slo(report.slo)
    form = load.form(load.model or first_model(url, api_key_file))
    server = Server.from_url(url, key_of(api_key_file))
    runs: list[tuple[str, Ran]] = []
    found: list[LoadFigures] = []
    for number, turn in enumerate(loop.turns()):
        plan = _plan(turn, load, form, number)
        with _bar(turn, plan.most, quiet=report.as_json) as watch:
            ran = asyncio.run(_measured(plan, turn, load, server, watch))
        runs.append((turn.name, ran))
        found.append(figures(ran, slo))
        _emit(record(url, form, turn, load, found[-1]), report)
        _save_requests(turn.name, ran, report.requests_out)
    if not report.as_json:
        from rich.console import Console

        Console().print(table([turn.name for turn in loop.turns()], found))
        _warn(found)
    if report.plot is not None:
        draw(runs, report.plot)
    if not any(one.completed for one in found):
        reasons = list(dict.fromkeys(why for one in found for why in one.reasons))
        more = f", and {len(reasons) - 3} more reasons" if len(reasons) > 3 else ""
        said = "; ".join(reasons[:3]) + more or "none was sent"
        raise PeerLost(url, f"not one request was answered: {said}")


def _plan(turn: Loop, load: LoadOptions, form: RequestForm, number: int) -> LoadPlan:
    """Each turn asks other prompts, so that none finds the last one's in a cache."""
    seed = load.seed + 1000 * number
    if load.prompts is not None:
        asks = from_file(load.prompts, form.endpoint, load.output_len)
    else:
        asks = generated(form, load.input_len, load.output_len, seed)
    plan = LoadPlan(form, asks, most=turn.requests, seconds=turn.duration, timeout=load.timeout)
    if turn.trace is not None:
        trace = read_trace(turn.trace, turn.requests)
        plan = replace(plan, times=scaled(trace, turn.rate_of), most=len(trace))
        return plan if load.prompts is not None else replace(plan, asks=load.traced(form, trace, seed))
    if turn.rate:
        return replace(plan, times=arrivals(turn.arrivals, turn.rate[0], turn.burst, seed))
    return replace(plan, streams=turn.concurrency[0])


async def _measured(plan: LoadPlan, turn: Loop, load: LoadOptions, server: Server, watch: Watch) -> Ran:
    connections = ConnectionPool(server)
    try:
        if turn.warm_up:
            streams = min(turn.warm_up, plan.streams)
            asks = generated(plan.form, load.input_len, load.output_len, load.seed + 999)
            await run(
                LoadPlan(plan.form, asks, streams, most=turn.warm_up, timeout=load.timeout), connections
            )
        return await run(plan, connections, watch)
    finally:
        connections.close()


@contextmanager
def _bar(turn: Loop, most: int | None, *, quiet: bool) -> Iterator[Watch]:
    """A bar on a terminal; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
        disable=quiet or not console.is_terminal,
    ) as bar:
        task, ticks = bar.add_task(turn.name, total=most, said=""), 0

        def watch(ran: Ran) -> None:
            nonlocal ticks
            ticks += 1
            if bar.disable or ticks % 10:  # five times a second
                return
            ended = sum(one.ended > 0 for one in ran.heard)
            tokens = sum(len(one.pieces) for one in ran.heard)
            said = f"{ended:,} answered, {len(ran.heard) - ended:,} open, {tokens:,} tokens"
            bar.update(task, completed=ended, said=said, refresh=True)

        yield watch


def _emit(row: dict[str, object], report: ReportOptions) -> None:
    line = json.dumps(row)
    if report.as_json:
        click.echo(line)
    if report.out is not None:
        with open(report.out, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def _save_requests(name: str, ran: Ran, path: Path | None) -> None:
    """One line per request, times in seconds from the first one's sending."""
    if path is None:
        return
    began = min((one.sent for one in ran.heard), default=0.0)
    with open(path, "a", encoding="utf-8") as file:
        for one in ran.heard:
            line = {
                "run": name,
                "outcome": one.outcome,
                "why": one.why,
                "due": one.due - began,
                "sent": one.sent - began,
                "ended": one.ended - began,
                "pieces": [at - began for at in one.pieces],
                "prompt_tokens": one.prompt_tokens,
                "completion_tokens": one.tokens,
                "finish_reason": one.finish_reason,
            }
            file.write(json.dumps(line) + "\n")


def _warn(found: list[LoadFigures]) -> None:
    """Where the figures may be the client's rather than the server's."""
    for one in found:
        for why in one.reasons:
            click.echo(f"{one.reasons[why]} x {why}", err=True)
    if any(one.client["core_share"] > 0.7 for one in found):
        click.echo("the client used most of a core: its own cost is in these times", err=True)
    if any(one.client["late_ms_p99"] > 100 for one in found if one.sent):
        click.echo("requests went out late: the client cannot keep this rate", err=True)
