"""A command with a hundred settings whose help is short: the common ones first, all others by topic.

`--help` shows the settings that are declared as common and the names of the topics, `--help TOPIC` the settings of
one, `--help all` every one. The topics and who belongs to them are declared with the settings.
"""

from collections.abc import Iterable

import click

from afserve.errors import ConfigError, shown
from afserve.settings import TOPICS, DeclaredSetting, settings_of

EVERYTHING = "all"
_FIRST = ""  # what `--help` alone asks for


def topic_command(*groups: type) -> type[click.Command]:
    """The class of a command whose flags are the settings of these groups."""
    declared = {one.name: one for group in groups for one in settings_of(group)}

    class TopicCommand(click.Command):
        def get_help_option(self, ctx: click.Context) -> click.Option:
            return _HelpOption(declared)

        def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            _write(self, ctx, formatter, declared, _FIRST)

    return TopicCommand


class _HelpOption(click.Option):
    """--help [TOPIC]; completes the names of the topics."""

    def __init__(self, declared: dict[str, DeclaredSetting]) -> None:
        super().__init__(
            ["--help"],
            is_flag=False,
            flag_value=_FIRST,
            is_eager=True,
            expose_value=False,
            metavar="[TOPIC]",
            callback=self._show,
            help="These, the settings of a TOPIC, or all.",
            shell_complete=lambda ctx, param, typed: [
                t for t in (*TOPICS, EVERYTHING) if t.startswith(typed)
            ],
        )
        self._declared = declared

    def _show(self, ctx: click.Context, param: click.Parameter, topic: str | None) -> None:
        """Raises ConfigError with the topics where there is no such one."""
        if topic is None or ctx.resilient_parsing:
            return
        if topic == _FIRST:
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        if topic != EVERYTHING and topic not in TOPICS:
            known = ", ".join((*TOPICS, EVERYTHING))
            raise ConfigError(f"--help {shown(topic)}: is not one of {known}")
        formatter = ctx.make_formatter()
        _write(ctx.command, ctx, formatter, self._declared, topic)
        click.echo(formatter.getvalue().strip(), color=ctx.color)
        ctx.exit()


def _write(
    command: click.Command,
    ctx: click.Context,
    formatter: click.HelpFormatter,
    declared: dict[str, DeclaredSetting],
    topic: str,
) -> None:
    options = [one for one in command.get_params(ctx) if isinstance(one, click.Option)]
    rows = {str(one.name): row for one in options if (row := one.get_help_record(ctx)) is not None}
    if topic == _FIRST:
        common = [name for name in rows if name not in declared or declared[name].common]
        _section(formatter, "Options", (rows[name] for name in common))
        _section(formatter, "More, by topic: --help TOPIC, or --help all", TOPICS.items())
        return
    for name in TOPICS if topic == EVERYTHING else (topic,):
        own = (row for key, row in rows.items() if key in declared and declared[key].topic == name)
        _section(formatter, f"{name} ({TOPICS[name]})", own)
    if topic == EVERYTHING:
        _section(formatter, "this command", (row for key, row in rows.items() if key not in declared))


def _section(formatter: click.HelpFormatter, title: str, rows: Iterable[tuple[str, str]]) -> None:
    with formatter.section(title):
        formatter.write_dl(list(rows))
