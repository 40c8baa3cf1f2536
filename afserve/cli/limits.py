"""The flags of `afserve up` that protect the server, one for each limit of `ServerSettings`, which says its range."""

from collections.abc import Callable
from typing import TypeVar

import click

from afserve.cli.options import Within
from afserve.server.settings import LIMITS, flag_of, help_of, range_of

F = TypeVar("F", bound=Callable[..., object])
SERVER_FLAGS = (*(limit.name for limit in LIMITS), "open_metrics", "allowed_host", "allowed_origin")


def _listed(ctx: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in value.split(","))))


def server_options(command: F) -> F:
    click.option(
        "--allowed-origin",
        default="",
        metavar="ORIGIN[,ORIGIN]",
        callback=_listed,
        help="Web pages, as https://chat.example.org, that may ask this server.",
    )(command)
    click.option(
        "--allowed-host",
        default="",
        metavar="NAME[,NAME]",
        callback=_listed,
        help="Further names that requests may call this server by.",
    )(command)
    click.option("--open-metrics", is_flag=True, help="/metrics needs no key where there is one.")(command)
    for limit in reversed(LIMITS):
        allowed = range_of(limit)
        kind = Within(allowed.low, allowed.high, whole=allowed.whole)
        click.option(
            flag_of(limit),
            default=limit.default,
            show_default=True,
            type=kind,
            metavar="N" if allowed.whole else "SECONDS",
            help=help_of(limit),
        )(command)
    return command
