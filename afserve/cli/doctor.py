"""`afserve doctor`: prints what the check-up finds and what would be started here."""

import json
from dataclasses import asdict

import click

_MARK = {"ok": ("+", "green"), "note": ("-", "yellow"), "missing": ("!", "red")}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def doctor(as_json: bool) -> int:
    """What this machine has, what is used, what is missing and how to get it.

    Exit code 1 when something that afserve cannot do without is missing.
    """
    from afserve.launch.checkup import BAD, findings

    found = list(findings())
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found]))
    else:
        for finding in found:
            mark, colour = _MARK[finding.level]
            click.echo(f"{click.style(mark, fg=colour)} {finding.what:14} {finding.found}")
            if finding.advice:
                click.echo(f"{'':17}{finding.advice}")
    return 1 if any(finding.level == BAD for finding in found) else 0
