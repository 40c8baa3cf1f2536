"""Flags from declared settings, and groups of settings from flags.

With `ENVIRONMENT` a command takes the same settings from variables such as AFSERVE_KV_TOKENS, and with `config_option`
from a TOML file. A flag comes before the environment, and that before the file.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from afserve.cli.options import Within, existing_file
from afserve.config_ranges import Range
from afserve.errors import ConfigError
from afserve.settings import DeclaredSetting, File, build, settings_of

Command = TypeVar("Command", bound=Callable[..., Any])
Group = TypeVar("Group")
ENVIRONMENT = {"auto_envvar_prefix": "AFSERVE"}


def settings_options(*groups: type) -> Callable[[Command], Command]:
    """A flag for each setting of the groups, in their order."""

    def with_options(command: Command) -> Command:
        for group in reversed(groups):
            for one in reversed(settings_of(group)):
                _option(one)(command)
        return command

    return with_options


def gather(group: type[Group], flags: dict[str, Any], **others: object) -> Group:
    """Takes a group's settings out of what click read. `others` are the fields that are no settings."""
    return build(group, {one.name: flags.pop(one.name) for one in settings_of(group)} | others)


def config_option(command: Command) -> Command:
    return click.option(
        "--config",
        type=existing_file,
        expose_value=False,
        is_eager=True,
        callback=config_file,
        help="TOML with the same names.",
    )(command)


def config_file(ctx: click.Context, option: click.Parameter, path: Path | None) -> None:
    """Take a command's defaults from a TOML file; flags still win. Raises ConfigError naming an unknown key."""
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}", param="config") from error
    known = {p.name for p in ctx.command.params if p.name not in (None, option.name)}
    defaults = {key.replace("-", "_"): value for key, value in values.items()}
    for key, value in defaults.items():
        if key not in known:
            names = ", ".join(sorted(str(name) for name in known))
            raise ConfigError(f"--config {path}: {key} is not one of {names}", param=key)
        if isinstance(value, dict | list):
            raise ConfigError(f"--config {path}: {key}: {value!r} is not a single value", param=key)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _option(one: DeclaredSetting) -> Callable[[Command], Command]:
    flag, shown = one.flag, not any(one.default is nothing for nothing in (None, False, ()))
    if one.kind is bool:
        name = f"{flag}/--no-{flag[2:]}" if one.default else flag
        return click.option(name, is_flag=True, default=one.default, show_default=shown, help=one.help)
    listed = one.kind is tuple
    without: dict[str, Any] = {} if one.bare is None else {"is_flag": False, "flag_value": one.bare}
    return click.option(
        flag,
        type=str if listed else _type(one),
        default="" if listed else one.default,
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
    if one.allowed is File.READ:
        return existing_file
    if one.allowed is File.FOLDER:
        return click.Path(exists=True, file_okay=False, path_type=Path)
    return click.Path(dir_okay=False, path_type=Path) if one.allowed is File.WRITTEN else one.kind


def _parts(ctx: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
    """A list as users write it: NAME,NAME."""
    return tuple(filter(None, (part.strip() for part in value.split(","))))
