"""`afserve keys`: make, list and revoke the API keys of a server; `server/access/key_file` does it."""

from dataclasses import asdict, dataclass
from pathlib import Path

import click

from afserve.cli.options import group_options, option
from afserve.server.access.key_file import KeyLimits, KeyRole, add_key, read_key_file, revoke_key

_HEADINGS = (
    "NAME",
    "ROLE",
    "REQUESTS/MIN",
    "TOKENS/MIN",
    "CONCURRENT",
    "PRIORITY",
    "SHARE",
    "CREATED",
    "REVOKED",
)
_FILE = click.option(
    "--file",
    "file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The key file that `afserve up --api-keys` is given.",
)


@click.group()
def keys() -> None:
    """Keys by which clients are known to a server.

    The file has their hashes, limits and names. A running server reads it again within a second of each change.
    """


@dataclass(frozen=True, slots=True)
class LimitFlags:
    """What a key may use."""

    requests_per_minute: int | None = option(type=int, metavar="N", help="Requests that it may begin.")
    tokens_per_minute: int | None = option(
        type=int, metavar="N", help="Prompt and generated tokens that it may use."
    )
    concurrent: int | None = option(type=int, metavar="N", help="Requests that are answered at once.")
    priority: int | None = option(
        type=int, metavar="N", help="The lowest number, the earliest turn, that it gets."
    )
    share: int | None = option(
        type=int,
        metavar="N",
        help="Its share of the tokens beside other keys' requests that wait; 1 without this, 2 is twice as many.",
    )


@keys.command()
@click.argument("name")
@_FILE
@click.option(
    "--role",
    type=click.Choice([str(role) for role in KeyRole]),
    default=str(KeyRole.USER),
    show_default=True,
    help="What it opens: the API, everything, or /metrics alone.",
)
@group_options(LimitFlags)
def new(limits: LimitFlags, name: str, file: Path, role: str) -> None:
    """Make a key for NAME and print it. It is shown this once; the file has its hash."""
    click.echo(add_key(file, name, KeyRole(role), KeyLimits(**asdict(limits))))


@keys.command("list")
@_FILE
def list_(file: Path) -> None:
    """The keys of a file, by name. No key can be shown again."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for key in read_key_file(file):
        of = key.limits
        numbers = (of.requests_per_minute, of.tokens_per_minute, of.concurrent, of.priority, of.share or 1)
        shown = ("-" if number is None else f"{number:,}" for number in numbers)
        rows.append((key.name, key.role, *shown, key.created or "-", key.revoked or "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@keys.command()
@click.argument("name")
@_FILE
def revoke(name: str, file: Path) -> None:
    """Let the key of NAME open nothing any more. Answers that have begun are finished."""
    revoke_key(file, name)
    click.echo(f"{name}: revoked; running servers refuse it within a second")
