"""`afserve up`: everything on this machine, or a cluster from here, from flags to a served API and back to nothing.

The flags are the settings of a few groups, which say their names, ranges and help; the work is in launch, control and
server.
"""

from contextlib import ExitStack
from pathlib import Path

import click
from click.core import ParameterSource

from afserve.cli.config_file import config_option, write, written
from afserve.cli.models_file import models_of
from afserve.cli.settings import ENVIRONMENT, gather, settings_options
from afserve.cli.topics import topic_command
from afserve.config import EngineSettings, ModelSource
from afserve.control.pilot.settings import PilotSettings
from afserve.errors import ConfigError
from afserve.launch.plan.ray_settings import RaySettings
from afserve.launch.plan.wishes import RunSettings, UpFlags, Wishes, check_companions
from afserve.server.http.settings import Listening, ServerSettings
from afserve.settings import settings_of

GROUPS = (
    RunSettings,
    ModelSource,
    Wishes,
    EngineSettings,
    PilotSettings,
    RaySettings,
    Listening,
    ServerSettings,
)


@click.command(cls=topic_command(*GROUPS), context_settings=ENVIRONMENT)
@click.argument("named", metavar="[MODEL]", required=False)
@settings_options(*GROUPS)
@config_option
@click.option(
    "--write-config",
    metavar="FILE",
    help="Write these settings for --config, - to see them, and start nothing.",
)
@click.pass_context
def up(ctx: click.Context, /, **flags: object) -> None:
    """Start everything on this machine, or a cluster from here, and serve the OpenAI API.

    MODEL is the same as --model: `afserve up nano`. What is not given is picked for the machine; the banner says what
    and why. With --cluster, nodes of hosts that are this machine start here, and a line to run is printed for each of
    the others; --ssh runs it. With --ray, the nodes start on a Ray cluster. With --models, several models are served,
    each by its own nodes.

    Each option may also stand in the environment, as AFSERVE_KV_TOKENS for --kv-tokens, or in the file of --config. A
    flag comes before the environment, and the environment before the file.
    """
    from afserve.launch.sites.choose import choose_site

    given = frozenset(n for n in flags if ctx.get_parameter_source(n) is not ParameterSource.DEFAULT)
    name, target = flags.pop("named"), flags.pop("write_config")
    if name is not None:
        if ctx.get_parameter_source("model") is ParameterSource.COMMANDLINE and flags["model"] != name:
            raise ConfigError(f"--model {flags['model']}: {name} is named too; drop one")
        flags, given = {**flags, "model": name}, given | {"model"}
    values = dict(flags)
    asked = _asked(ctx, flags, given)
    if target is not None:
        write(str(target), written([one for group in GROUPS for one in settings_of(group)], values))
        return
    check_companions(asked)
    with ExitStack() as until_end:
        sites = [until_end.enter_context(choose_site(each.run, each.ray)) for each in asked]
        from afserve.launch.run.up import serve_here  # while the nodes' helper imports torch

        serve_here(asked, sites)


def _asked(ctx: click.Context, flags: dict[str, object], given: frozenset[str]) -> list[UpFlags]:
    """By model."""
    path = flags["models"]
    if path is None:
        return [asked_of(flags, given)]
    assert isinstance(path, Path)
    found = []
    for number, each in enumerate(models_of(ctx, path, flags, given), 1):
        try:
            found.append(asked_of(each, given))
        except ConfigError as error:
            raise ConfigError(f"--models {path}: model {number}: {error.message}") from error
    return found


def asked_of(flags: dict[str, object], given: frozenset[str] = frozenset()) -> UpFlags:
    """The groups that the flags belong to."""
    run = gather(RunSettings, flags)
    source = gather(ModelSource, flags, path="", name=run.model)
    wishes = gather(Wishes, flags, engine=gather(EngineSettings, flags))
    ray, listening = gather(RaySettings, flags), gather(Listening, flags)
    limits, pilot = gather(ServerSettings, flags), gather(PilotSettings, flags)
    return UpFlags(run, source, wishes, listening, limits, ray, pilot, given)
