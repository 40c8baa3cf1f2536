"""`afserve doctor`: prints what the check-up finds and what would be started here."""

import json
from dataclasses import asdict
from pathlib import Path

import click

_MARK = {"ok": ("+", "green"), "note": ("-", "yellow"), "missing": ("!", "red")}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option(
    "--io",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Measure how this folder of --kv-ssd is read fastest, and use that from now on (256 MiB, a minute). Builds "
    "DeepSpeed's asynchronous I/O first where that is installed and not built yet (once, at most an hour).",
)
@click.option(
    "--numa",
    is_flag=True,
    help="List NUMA nodes (sockets, or parts of them) and measure how fast each one's cores read each one's memory "
    "(256 MiB, seconds).",
)
def doctor(as_json: bool, io: Path | None, numa: bool) -> int:
    """What this machine has, what is used, what is missing and how to get it.

    Exit code 1 when something that afserve cannot do without is missing.
    """
    from afserve.launch.plan.checkup import findings
    from afserve.launch.plan.checkup_disk import BAD, disk
    from afserve.launch.plan.checkup_numa import numa_in_full

    def tell(line: str) -> None:
        click.echo(line, err=True)

    found = [*findings(), *(disk(io, tell) if io is not None else ()), *(numa_in_full() if numa else ())]
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found]))
    else:
        for finding in found:
            mark, colour = _MARK[finding.level]
            click.echo(f"{click.style(mark, fg=colour)} {finding.what:14} {finding.found}")
            if finding.advice:
                click.echo(f"{'':17}{finding.advice}")
    return 1 if any(finding.level == BAD for finding in found) else 0
