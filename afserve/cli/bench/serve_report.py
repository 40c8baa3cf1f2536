"""What a load run is told as: a row with machine, commit and date, or a table. Times in milliseconds."""

import os
from collections.abc import Sequence

from afserve.cli.bench.report import measured_here
from afserve.cli.bench.serve_options import LoadOptions, Loop
from afserve.cli.load.asks import Form
from afserve.cli.load.figures import LoadFigures


def record(url: str, form: Form, turn: Loop, load: LoadOptions, found: LoadFigures) -> dict[str, object]:
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
