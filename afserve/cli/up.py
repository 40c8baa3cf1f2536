"""`afserve up`: everything on this machine, or a cluster from here, from flags to a served API and back to nothing.

The flags are the settings of a few groups, which say their names, ranges and help; the work is in launch, control and
server.
"""

import click
from click.core import ParameterSource

from afserve.cli.config_file import config_option, write, written
from afserve.cli.settings import ENVIRONMENT, gather, settings_options
from afserve.config import EngineSettings, ModelSource
from afserve.errors import ConfigError
from afserve.launch.ray_settings import RaySettings
from afserve.launch.wishes import RunSettings, UpFlags, Wishes
from afserve.server.settings import Listening, ServerSettings
from afserve.settings import settings_of

GROUPS = (RunSettings, ModelSource, Wishes, EngineSettings, RaySettings, Listening, ServerSettings)


@click.command(context_settings=ENVIRONMENT)
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
    the others; --ssh runs it. With --ray, the nodes start on a Ray cluster.

    Each option may also stand in the environment, as AFSERVE_KV_TOKENS for --kv-tokens, or in the file of --config. A
    flag comes before the environment, and the environment before the file.
    """
    from afserve.launch.processes import NodeProcesses, token_at

    given = frozenset(n for n in flags if ctx.get_parameter_source(n) is not ParameterSource.DEFAULT)
    name, target = flags.pop("named"), flags.pop("write_config")
    if name is not None:
        if ctx.get_parameter_source("model") is ParameterSource.COMMANDLINE and flags["model"] != name:
            raise ConfigError(f"--model {flags['model']}: {name} is named too; drop one", param="model")
        flags, given = {**flags, "model": name}, given | {"model"}
    values = dict(flags)
    asked = asked_of(flags, given)
    if target is not None:
        write(str(target), written([one for group in GROUPS for one in settings_of(group)], values))
        return
    with NodeProcesses(
        token_at(asked.run.token_file), warm=asked.ray.ray is None and not asked.run.elsewhere
    ) as processes:  # imports torch
        from afserve.launch.run import serve_here

        serve_here(asked, processes)


def asked_of(flags: dict[str, object], given: frozenset[str] = frozenset()) -> UpFlags:
    """The groups that the flags belong to."""
    run = gather(RunSettings, flags)
    source = gather(ModelSource, flags, path="", name=run.model)
    wishes = gather(Wishes, flags, engine=gather(EngineSettings, flags))
    ray, listening = gather(RaySettings, flags), gather(Listening, flags)
    return UpFlags(run, source, wishes, listening, gather(ServerSettings, flags), ray, given)
