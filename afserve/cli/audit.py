"""`afserve audit`: checks that nobody has changed, removed or put in a line of an audit log."""

from pathlib import Path

import click

from afserve.errors import ConfigError
from afserve.server.http.audit_chain import START, check_chain


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--after",
    default=START,
    metavar="HASH",
    help="Of the line before the first one here, where files before it are kept elsewhere.",
)
def audit(files: tuple[Path, ...], after: str) -> None:
    """Check the chain of FILES, which --audit-log of `afserve up` writes. A file that was moved away goes before the
    one that came after it. Ends with 1 where the chain is broken."""
    try:
        found = check_chain(files, after)
    except OSError as error:
        raise ConfigError(f"{error.filename or files[0]}: {error.strerror}") from error
    if found.broken is None:
        names = ", ".join(map(str, files))
        click.echo(
            f"{names}: {found.lines} lines, each follows from the one before; the last hash is {found.last}"
        )
        return
    file, number, why = found.broken
    hint = "; name the files before it first, or --after HASH" if not found.lines and number == 1 else ""
    click.echo(f"{file}: line {number} {why}{hint if 'follow' in why else ''}", err=True)
    raise click.exceptions.Exit(1)
