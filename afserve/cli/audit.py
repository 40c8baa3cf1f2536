"""`afserve audit`: checks that nobody has changed, removed or put in a line of an audit log."""

from pathlib import Path

import click

from afserve.errors import ConfigError
from afserve.server.http.audit_log import check_chain


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def audit(file: Path) -> None:
    """Check the chain of FILE, which --audit-log of `afserve up` writes. Ends with 1 where it is broken."""
    try:
        found = check_chain(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    if found.broken is None:
        click.echo(f"{file}: {found.lines} lines, each follows from the one before")
        return
    click.echo(f"{file}: line {found.broken} {found.why}", err=True)
    raise click.exceptions.Exit(1)
