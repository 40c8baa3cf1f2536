"""Flags from declared settings, and groups of settings from flags.

With `ENVIRONMENT` a command takes the same settings from variables such as AFSERVE_KV_TOKENS, and with
`config_file.config_option` from a TOML file. A flag comes before the environment, and that before the file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from afserve.cli.options import Within, existing_file
from afserve.config_ranges import Range
from afserve.errors import shown
from afserve.settings import DeclaredSetting, FileUse, build, settings_of

Command = TypeVar("Command", bound=Callable[..., Any])
Group = TypeVar("Group")
ENVIRONMENT = {"auto_envvar_prefix": "AFSERVE"}
_ALSO = {"tensor_parallel": "--tensor-parallel-size"}  # as vLLM calls it


def settings_options(*groups: type) -> Callable[[Command], Command]:
    """A flag for each setting of the groups, in their order."""

    def with_options(command: Command) -> Command:
        for group in reversed(groups):
            for one in reversed(settings_of(group)):
                _option(one)(command)
        return command

    return with_options


def setting_option(group: type, name: str) -> Callable[[Command], Command]:
    """The flag of one setting, for a command that obeys no more of its group."""
    return _option(next(one for one in settings_of(group) if one.name == name))


def gather(group: type[Group], flags: dict[str, Any], **others: object) -> Group:
    """Takes a group's settings out of what click read. `others` are the fields that are no settings."""
    return build(group, {one.name: flags.pop(one.name) for one in settings_of(group)} | others)


def _option(one: DeclaredSetting) -> Callable[[Command], Command]:
    flag, shown = (
        one.flag,
        not any(one.default is nothing for nothing in (None, False, ())) and one.default != "",
    )
    if one.kind is bool:
        name = flag if one.default is False else f"{flag}/--no-{flag[2:]}"
        return click.option(name, is_flag=True, default=one.default, show_default=shown, help=one.help)
    listed = one.kind is tuple
    without: dict[str, Any] = {} if one.bare is None else {"is_flag": False, "flag_value": one.bare}
    return click.option(
        *filter(None, (flag, _ALSO.get(one.name))),
        type=str if listed else _type(one),
        default=",".join(one.default) if isinstance(one.default, tuple) else one.default,
        show_default=shown,
        metavar=one.metavar,
        callback=_parts if listed else None,
        help=one.help or None,
        **without,
    )


def _type(one: DeclaredSetting) -> Any:
    if isinstance(one.allowed, tuple):
        return click.Choice(one.allowed)
    if isinstance(one.allowed, Range):
        low, high = one.allowed.low, one.allowed.high
        if one.shows_range:
            return click.IntRange(low, high)  # type: ignore[arg-type]
        return Within(low, high, whole=one.allowed.whole)
    if one.allowed is FileUse.READ:
        return existing_file
    if one.allowed is FileUse.FOLDER:
        return click.Path(exists=True, file_okay=False, path_type=Path)
    return click.Path(dir_okay=False, path_type=Path) if one.allowed is FileUse.WRITTEN else one.kind


def _parts(ctx: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
    """A list as users write it: NAME,NAME. An empty part is a slip, also an empty text that somebody typed."""
    typed = ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    parts = tuple(part.strip() for part in value.split(",")) if value.strip() or typed else ()
    if not all(parts):
        raise click.BadParameter(
            f"{shown(value)} has an empty part; write a name there, or leave it out", ctx, option
        )
    twice = next((part for part in parts if parts.count(part) > 1), None)
    if twice is not None:
        raise click.BadParameter(f"{shown(value)} has {shown(twice)} twice; write it once", ctx, option)
    return parts
