"""`afserve down`: ends a running server with all its nodes, on this machine, on Ray or on other hosts."""

import json
import time

import click

from afserve.cli.connection import AdminFlags, connect
from afserve.cli.options import group_options
from afserve.doors.client import Client
from afserve.errors import CapacityError, DeadlineError, PeerError

_LOOK_SECONDS = 0.2


@click.command()
@group_options(AdminFlags)
def down(admin: AdminFlags) -> None:
    """End a running server and its nodes. Running requests have as long as `--drain-seconds` of `afserve up` says."""
    with connect(admin.url, admin.admin_key_file) as client:
        going = client.down()["going"]
        assert isinstance(going, list)
        if not admin.as_json:
            click.echo(f"ending: {', '.join(going)}")
        if not admin.no_wait:
            _wait(client, admin.timeout)
    if admin.as_json:
        click.echo(json.dumps({"going": going, "done": not admin.no_wait}))
    elif not admin.no_wait:
        click.echo("it has ended")


def _wait(client: Client, timeout: float) -> None:
    until = time.monotonic() + timeout
    while _answers(client):
        if time.monotonic() > until:
            raise DeadlineError(f"the server still answers after {timeout:g} s; it goes on ending")
        time.sleep(_LOOK_SECONDS)


def _answers(client: Client) -> bool:
    """A server that drains does, with a refusal."""
    try:
        client.status()
    except (CapacityError, DeadlineError):
        return True
    except PeerError:
        return False
    return True
