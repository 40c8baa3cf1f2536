"""`afserve node`: one node, for hosts that are started by other means than `afserve up`."""

from pathlib import Path

import click
from click.core import ParameterSource

from afserve.cli.settings import gather, setting_option, settings_options
from afserve.config import FULL, SAMPLES, EngineSettings
from afserve.errors import ConfigError
from afserve.member import Role
from afserve.server.http.settings import Listening, ServerSettings
from afserve.settings import settings_of

_OF_GATEWAYS = {one.name: one.flag for group in (Listening, ServerSettings) for one in settings_of(group)}


@click.command()
@click.option(
    "--role", required=True, type=click.Choice([role.value for role in Role]), help="What this node does."
)
@click.option("--join", required=True, metavar="HOST:PORT", help="The controller.")
@click.option(
    "--token-file",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A copy of the run's token.",
)
@click.option(
    "--index", type=click.IntRange(min=0), help="Which node of its role; any free one if not given."
)
@click.option(
    "--certs",
    type=click.Path(exists=True, file_okay=False),
    help="This host's certificates, from `afserve certs issue`.",
)
@click.option("--insecure-nodes", is_flag=True, help="Speak plain text beyond this host.")
@setting_option(EngineSettings, "isa")
@click.option(
    "--numa",
    type=click.IntRange(min=0),
    metavar="NUMBER",
    help="Bind to the cores and memory of this NUMA node; if not given, it runs wherever it was started to.",
)
@settings_options(Listening, ServerSettings)
@click.option(
    "--verify",
    default=SAMPLES,
    show_default=True,
    type=click.Choice((SAMPLES, FULL)),
    help="full: compare all bytes of the checkpoint here with the controller's.",
)
@click.pass_context
def node(
    ctx: click.Context,
    /,
    role: str,
    join: str,
    token_file: str,
    index: int | None,
    verify: str,
    certs: str | None,
    insecure_nodes: bool,
    isa: str,
    numa: int | None,
    **gateway: object,
) -> None:
    """Start one node that joins a controller elsewhere.

    Model, sizes and limits come from the controller; the checkpoint must be at the same path here:
    a copy with other weights or another tokenizer is refused. An
    expert node listens for rows on the address that it reaches the controller from.

    A gateway serves the OpenAI API on an address of its own, given by --host and --port; the options from there on
    are a gateway's, with the meaning that they have for `afserve up`.
    """
    from afserve.control.node.worker import NodeSettings, run_node
    from afserve.control.wire.channel import read_token
    from afserve.launch.plan.numa import seat_numbered

    _show_progress()
    token = read_token(Path(token_file))
    binding = None if numa is None else seat_numbered(numa)
    settings = NodeSettings(role, join, token, index, verify, certs or "", insecure_nodes, isa, binding)
    if role != Role.GATEWAY:
        _check_no_gateway(ctx, role)
        run_node(settings)
        return
    from afserve.launch.processes.gateway_node import joining

    run_node(settings, {Role.GATEWAY: joining(gather(Listening, gateway), gather(ServerSettings, gateway))})


def _check_no_gateway(ctx: click.Context, role: str) -> None:
    for name, flag in _OF_GATEWAYS.items():
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise ConfigError(f"{flag}: is for --role gateway; drop it for --role {role}", param=name)


def _show_progress() -> None:
    """Of reading all bytes, as lines."""
    import logging

    log = logging.getLogger("afserve.verify")
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
