"""`afserve scale`, `drain` and `restart`: change a running server while it serves, and watch until it is done."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from afserve.cli.connection import AdminFlags, connect, model_option
from afserve.cli.options import group_options
from afserve.doors.client import Client
from afserve.errors import CapacityError, ConfigError, DeadlineError, PeerError

Fields = Mapping[str, Any]  # parsed JSON
Pids = dict[str, int]  # of the nodes that are ready, by name
_LOOK_SECONDS = 0.2
_SILENT_SECONDS = 10.0  # a server that does not answer for longer is gone
_NUMBER = "N, or +N or -N: how many more or fewer."


@click.command(no_args_is_help=True)
@click.option("--attention", metavar="N", help=f"Attention nodes: {_NUMBER}")
@click.option("--prefill", metavar="N", help="Attention nodes that compute prompts for the decode nodes.")
@click.option("--decode", metavar="N", help="Attention nodes that decode what these have computed.")
@click.option("--experts", metavar="N", help="Expert nodes.")
@click.option("--gateways", metavar="N", help="Gateways, where HTTP has processes of its own.")
@click.option(
    "--role", metavar="NODE=ROLE", help="Give one node another role, attention or expert, where it is."
)
@click.option(
    "--phase", metavar="NODE=PHASE", help="Put one attention node into a phase: prefill, decode or both."
)
@group_options(AdminFlags)
@model_option
def scale(
    admin: AdminFlags,
    attention: str | None,
    prefill: str | None,
    decode: str | None,
    experts: str | None,
    gateways: str | None,
    role: str | None,
    phase: str | None,
    model: str | None,
) -> None:
    """Change how many nodes a running server has: `afserve scale --attention +1 --experts 3`.

    Requests go on meanwhile and no token changes. New nodes start on the server's machine. Who goes first takes nothing
    new and ends what runs on it; experts move before their node goes. With --role expert-2=attention that node goes
    so, and an attention node starts where it was. With --phase attention-1=decode that node takes what is new in its
    new phase; what runs on it ends there.
    """
    pools = {
        "attention": attention,
        "prefill": prefill,
        "decode": decode,
        "experts": experts,
        "gateways": gateways,
    }
    counts = {pool: count for pool, count in pools.items() if count is not None}
    if sum(map(bool, (counts, role, phase))) != 1:
        raise ConfigError(
            "scale: say how many, such as --attention +1 or --experts 3, or one --role, such as expert-2=attention, or "
            "one --phase, such as attention-1=decode"
        )
    with connect(admin.url, admin.admin_key_file, model) as client:
        if role:
            answer = client.change_role(*_named("role", role, "expert-2=attention"))
        elif phase:
            answer = client.change_phase(*_named("phase", phase, "attention-1=decode"))
        else:
            answer = client.scale(**counts)
        _follow(client, answer, admin)


def _named(what: str, text: str, example: str) -> tuple[str, str]:
    node, separator, value = text.partition("=")
    if not (node and separator and value):
        raise ConfigError(f"--{what}: {text!r} is not NODE={what.upper()}, such as {example}")
    return node, value


@click.command()
@click.argument("node")
@group_options(AdminFlags)
@model_option
def drain(admin: AdminFlags, node: str, model: str | None) -> None:
    """Let one node of a running server go: `afserve drain expert-1`.

    It takes nothing new and goes once nothing needs it; its role has one node less from then on.
    """
    with connect(admin.url, admin.admin_key_file, model) as client:
        _follow(client, client.drain(node), admin)


@click.command()
@click.argument("nodes", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All nodes.")
@group_options(AdminFlags)
@model_option
def restart(admin: AdminFlags, nodes: tuple[str, ...], every: bool, model: str | None) -> None:
    """Give nodes of a running server new processes, one after another: `afserve restart expert-1` or `--all`.

    Each starts when the one before it serves. A node takes nothing new and ends what runs on it first, and its experts
    move to the others where these have room.
    """
    if bool(nodes) == every:
        raise ConfigError("restart: name the nodes, or give --all")
    with connect(admin.url, admin.admin_key_file, model) as client:
        before = _pids(client.status())
        _follow(client, client.restart(*nodes), admin, before)


def _follow(client: Client, answer: Fields, admin: AdminFlags, before: Pids | None = None) -> None:
    """Says what has begun, and with each node that has come or gone how far it is; as JSON what the server answered."""
    say: Callable[[str], object] = _silent if admin.as_json else click.echo
    for note in answer["notes"]:
        say(note)
    counts = ", ".join(f"{count} {pool}" for pool, count in answer["counts"].items() if count)
    if not admin.no_wait:
        done = _coming(answer["coming"], before or {})
        done |= {name: _is_gone(name) for name in answer["going"] if name not in done}
        _wait(client, done, admin.timeout, say)
    say(f"begun; wanted: {counts}" if admin.no_wait else f"done: {counts}")
    if admin.as_json:
        click.echo(json.dumps({**answer, "done": not admin.no_wait}))


def _silent(line: str) -> None:
    """With --json."""


def _coming(names: list[str], before: Pids) -> dict[str, Callable[[Fields], str]]:
    return {name: _is_new(name, before.get(name)) for name in names}


def _is_new(name: str, old: int | None) -> Callable[[Fields], str]:
    def said(status: Fields) -> str:
        pid = _pids(status).get(name)
        return "" if pid is None or pid == old else f"{name} serves, pid {pid}"

    return said


def _is_gone(name: str) -> Callable[[Fields], str]:
    def said(status: Fields) -> str:
        return "" if any(node["name"] == name for node in status["nodes"]) else f"{name} has gone"

    return said


def _wait(
    client: Client, waited: dict[str, Callable[[Fields], str]], timeout: float, say: Callable[[str], object]
) -> None:
    """Until each has something to say. A gateway that goes may take this connection with it: it is asked again."""
    heard = time.monotonic()
    until = heard + timeout
    while waited:
        if time.monotonic() > until:
            raise DeadlineError(
                f"{', '.join(waited)}: not done after {timeout:g} s; it goes on, see `afserve status`"
            )
        time.sleep(_LOOK_SECONDS)
        try:
            status = client.status()
        except (PeerError, CapacityError):
            if time.monotonic() > heard + _SILENT_SECONDS:
                raise
            continue
        heard = time.monotonic()
        for name in list(waited):
            if said := waited[name](status):
                say(said)
                del waited[name]


def _pids(status: Fields) -> Pids:
    return {node["name"]: node["pid"] for node in status["nodes"] if node["state"] == "ready"}
