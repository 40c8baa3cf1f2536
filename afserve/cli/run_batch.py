"""`afserve run-batch`: a file of requests in OpenAI's batch form against a server, and their answers as a file."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from afserve.cli.batch_lines import answered, read_lines
from afserve.cli.connection import key_of, server_options
from afserve.cli.options import Within, existing_file
from afserve.errors import ConfigError


@dataclass(slots=True)
class Counts:
    """Of lines. `earlier` were in the output already."""

    total: int
    earlier: int = 0
    answered: int = 0
    failed: int = 0


@click.command("run-batch")
@click.argument("file", type=existing_file)
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Answers go here, one line each, as they come.",
)
@click.option("--go-on", is_flag=True, help="Keep what --output has and ask what has no answer there.")
@click.option(
    "--concurrency", default=16, show_default=True, type=click.IntRange(1, 4096), help="Requests at once."
)
@click.option(
    "--retries",
    default=8,
    show_default=True,
    type=click.IntRange(0, 1000),
    help="Times that a request is sent again where the server was full or the connection broke.",
)
@click.option(
    "--timeout", default=3600.0, show_default=True, type=Within(0.01, 1e6), help="Seconds for one answer."
)
@click.option("--model", help="Start a server for this batch, with this model as `afserve up` takes it.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
@server_options
def run_batch(
    file: Path,
    output: Path,
    go_on: bool,
    concurrency: int,
    retries: int,
    timeout: float,
    model: str | None,
    as_json: bool,
    url: str,
    api_key_file: str | None,
) -> int:
    """Answer FILE: JSON lines with custom_id, method, url and body, as OpenAI's batches have them.

    Each answer is a line with its custom_id, status and body, in the order in which they come. Exit code 1 when a
    request failed; --go-on asks those again.
    """
    from afserve.cli.batch_work import Manner, work

    lines = read_lines(file)
    done = _earlier(output, go_on)
    left = [line for line in lines if line.custom_id not in done]
    counts = Counts(len(lines), earlier=len(lines) - len(left))
    with _server(model, url) as where, output.open("a", encoding="utf-8") as out, _bar(counts) as told:
        manner = Manner(where, key_of(api_key_file), concurrency, retries, timeout)
        asyncio.run(work(left, manner, out, told))
    if as_json:
        click.echo(json.dumps({"output": str(output), **asdict(counts)}))
    else:
        earlier = f", {counts.earlier} were there" if counts.earlier else ""
        click.echo(f"{counts.answered} of {counts.total} answered, {counts.failed} failed{earlier}: {output}")
    return 1 if counts.failed else 0


def _earlier(output: Path, go_on: bool) -> set[str]:
    if not output.exists() or not output.stat().st_size:
        return set()
    if not go_on:
        raise ConfigError(f"--output {output}: is there already; give a new name, or --go-on")
    return answered(output)


@contextmanager
def _server(model: str | None, url: str) -> Iterator[str]:
    """Where requests go: to the server that runs, or to one for this batch."""
    if model is None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    from afserve.cli.own_server import own_server

    with own_server(model) as here:
        yield here


@contextmanager
def _bar(counts: Counts) -> Iterator[Callable[[bool], None]]:
    """Counts, and shows how far it is on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=counts.total, completed=counts.earlier)

        def told(good: bool) -> None:
            counts.answered += good
            counts.failed += not good
            bar.advance(task)

        yield told
