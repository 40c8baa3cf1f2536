"""`afserve audit`: checks that nobody has changed, removed or put in a line of an audit log."""

import re
from pathlib import Path

import click

from afserve.errors import ConfigError, shown
from afserve.server.http.audit_chain import START, Checked, check_chain


def _hash(context: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    if given is not None and not re.fullmatch("[0-9a-f]{64}", given):
        raise ConfigError(
            f"--{parameter.name}: {shown(given)} is no hash of a line: 64 digits of 0-9 and a-f"
        )
    return given


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--after",
    default=START,
    callback=_hash,
    metavar="HASH",
    help="Of the line before the first one here, where files before it are kept elsewhere.",
)
@click.option(
    "--last",
    callback=_hash,
    metavar="HASH",
    help="That an earlier check printed: its line, which may have others behind it by now, must be there.",
)
@click.option("--lines", type=click.IntRange(min=0), metavar="N", help="At least so many must be there.")
def audit(files: tuple[Path, ...], after: str, last: str | None, lines: int | None) -> None:
    """Check the chain of FILES, which --audit-log of `afserve up` writes. A file that was moved away goes before the
    one that came after it. Ends with 1 where the chain is broken, or ends before what --last and --lines expect."""
    try:
        found = check_chain(files, after, last or START)
    except OSError as error:
        raise ConfigError(f"{error.filename or files[0]}: {error.strerror}") from error
    names = ", ".join(map(str, files))
    if (wrong := _wrong(found, names, last, lines)) is not None:
        click.echo(wrong, err=True)
        raise click.exceptions.Exit(1)
    click.echo(
        f"{names}: {found.lines} lines, each follows from the one before; the last hash is {found.last}"
    )
    if last is not None:
        click.echo(f"the line of --last is there, with {found.behind} lines behind it")
    elif lines is None:
        click.echo(
            "Whether lines are missing at the end cannot be seen here: keep this hash elsewhere, and give it to the "
            "next check as --last, or `audit` of the running server's /status"
        )


def _wrong(found: Checked, names: str, last: str | None, lines: int | None) -> str | None:
    if found.broken is not None:
        file, number, why = found.broken
        hint = (
            "; name the files before it first, or --after HASH" if not found.lines and "follow" in why else ""
        )
        return f"{file}: line {number} {why}{hint}; {found.lines} lines before it hold, up to {found.last}"
    if last is not None and found.behind is None:
        return f"{names}: none of its {found.lines} lines has the hash of --last, so lines are missing at the end"
    if lines is not None and found.lines < lines:
        return f"{names}: {found.lines} lines, at least {lines} are expected, so lines are missing at the end"
    return None
