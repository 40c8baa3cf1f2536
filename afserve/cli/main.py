"""`afserve`: the table of commands. Each is imported when it is called, so `--help` needs neither torch nor gRPC.

An AfserveError becomes one line on stderr and its exit code, and so does a path that cannot be used; nothing else is
caught.
"""

import errno
import importlib
import importlib.util
import sys
from collections.abc import Sequence

import click

from afserve import __version__
from afserve.errors import AfserveError, shown

# name -> (where it lives, what `afserve --help` says). A command whose module is not installed is not shown.
COMMANDS = {
    "up": ("afserve.cli.up:up", "Start everything on this machine and serve the OpenAI API."),
    "pull": ("afserve.cli.pull:pull", "Fetch a checkpoint from the Hugging Face hub."),
    "chat": ("afserve.cli.chat.command:chat", "Talk to a running server."),
    "complete": ("afserve.cli.chat.complete:complete", "Continue a text on a running server."),
    "warm": ("afserve.cli.chat.warm:warm", "Compute a prompt that will come, and keep it in the cache."),
    "run-batch": ("afserve.cli.run_batch:run_batch", "Answer a file of requests in OpenAI's batch form."),
    "status": ("afserve.cli.status:status", "Members, load and memory of a running server."),
    "top": ("afserve.cli.top:top", "The same, live."),
    "scale": ("afserve.cli.scale:scale", "Change how many nodes a running server has."),
    "drain": ("afserve.cli.scale:drain", "Let one node of a running server go."),
    "restart": (
        "afserve.cli.scale:restart",
        "Give nodes of a running server new processes, one after another.",
    ),
    "down": ("afserve.cli.down:down", "End a running server and its nodes, wherever they are."),
    "chaos": ("afserve.cli.chaos:chaos", "Break nodes of a running server on purpose, and watch."),
    "plan": ("afserve.cli.plan.command:plan", "Plan capacity: what to buy, how to split it, what it costs."),
    "fleet": ("afserve.cli.plan.fleet:fleet", "What to buy and when: loads by hour, prices, energy, spares."),
    "place": ("afserve.cli.plan.place:place", "Place experts on nodes from routing counts."),
    "simulate": ("afserve.cli.plan.simulate:simulate", "Play a plan event by event."),
    "pilot": ("afserve.cli.pilot.command:pilot", "What a pilot of pools would have done with a trace."),
    "bench": ("afserve.cli.bench:bench", "Measure this installation."),
    "node": ("afserve.cli.node:node", "Start one node that joins a controller elsewhere."),
    "render": ("afserve.cli.render:render", "Files for Kubernetes, KubeRay or Slurm, from a cluster file."),
    "host": ("afserve.cli.host:host", "Start what a cluster file has on this host, for `up` elsewhere."),
    "certs": ("afserve.cli.certs:certs", "A private authority, and certificates for its hosts."),
    "keys": ("afserve.cli.keys:keys", "Make, list and revoke API keys."),
    "audit": ("afserve.cli.audit:audit", "Check that nobody has changed an audit log."),
    "completion": ("afserve.cli.completion:completion", "Let a shell complete `afserve`: bash, zsh, fish."),
    "doctor": ("afserve.cli.doctor:doctor", "What this machine has, what is used, what is missing."),
    "tune": ("afserve.cli.tune:tune", "How fast this machine is, and what `up` would choose here."),
    "version": ("afserve.cli.version:version", "Versions of afserve and what it stands on."),
}


class LazyGroup(click.Group):
    """A group whose commands are rows of a table of the same form as COMMANDS."""

    def __init__(self, table: dict[str, tuple[str, str]], name: str, help: str) -> None:
        super().__init__(name, help=help)
        self._table = {name: row for name, row in table.items() if _installed(row[0])}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        module, _, attribute = self._table[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in self._table.items()])


def _installed(target: str) -> bool:
    return importlib.util.find_spec(target.partition(":")[0]) is not None


cli = LazyGroup(
    COMMANDS,
    "afserve",
    "Serve Mixture-of-Experts models with attention and experts on separate hardware.\n\n"
    "`afserve up` with no flags serves the bundled model on http://127.0.0.1:8000.",
)
cli = click.version_option(__version__, prog_name="afserve", message="%(prog)s %(version)s")(cli)


_UNUSABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP)
"""What a path that somebody typed may be, wherever it is looked at first."""


def run(arguments: Sequence[str]) -> int:
    """The exit code: 0, 1 for a failure of ours or of a node, 2 for what the caller can fix, 130 for Ctrl-C."""
    try:
        code = cli.main(list(arguments), prog_name="afserve", standalone_mode=False)
    except click.ClickException as error:
        return _say(error.format_message(), error.exit_code)
    except AfserveError as error:
        return _say(error.message, error.exit_code)
    except OSError as error:
        if error.filename is None or error.errno not in _UNUSABLE:
            raise
        return _say(f"{shown(str(error.filename))}: {error.strerror}; give another file or name", 2)
    except (click.Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0


def _say(message: str, code: int) -> int:
    """What was typed may be quoted in it: no control character reaches the terminal."""
    told = (char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in message)
    print(f"error: {''.join(told)}", file=sys.stderr)
    return code


def main() -> None:
    sys.exit(run(sys.argv[1:]))
