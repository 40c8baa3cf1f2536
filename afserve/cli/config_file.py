"""A command's options as a TOML file, read and written. Its `schema` says how the file is to be read.

The keys are the names of the options. The command line comes before the environment, and that before the file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from afserve.cli.options import existing_file, read_given_toml
from afserve.errors import ConfigError, shown
from afserve.settings import DeclaredSetting

SCHEMA = 1  # goes up when an older file would mean something else
NO_SETTINGS = frozenset({"config", "write_config"})


def config_option(command: Any) -> Any:
    """--config FILE."""
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
    defaults = _read(path)
    options = (p for p in ctx.command.params if isinstance(p, click.Option) and p.name not in NO_SETTINGS)
    known = {str(option.name): option for option in options}
    for key, value in defaults.items():
        if key not in known:
            raise ConfigError(f"--config {path}: {key} is not one of {', '.join(sorted(known))}", param=key)
        if isinstance(value, dict | list):
            raise ConfigError(f"--config {path}: {key}: {value!r} is not a single value", param=key)
        if isinstance(known[key].type, click.types.IntParamType) and isinstance(value, bool | float):
            raise ConfigError(f"--config {path}: {key}: {value!r} is not a whole number", param=key)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _read(path: Path) -> dict[str, object]:
    values = read_given_toml(path, f"--config {path}")
    schema = values.pop("schema", SCHEMA)
    if schema != SCHEMA or isinstance(schema, bool):
        raise ConfigError(
            f"--config {path}: schema: {shown(schema)} is not {SCHEMA}, which this afserve reads; write the file anew "
            "with --write-config",
            param="schema",
        )
    return {key.replace("-", "_"): value for key, value in values.items()}


def written(settings: Sequence[DeclaredSetting], values: Mapping[str, object]) -> str:
    """A file that gives the same again: what differs from the defaults as lines, the defaults as comments."""
    lines = [f"# afserve up --config FILE. What is commented out has its default.\nschema = {SCHEMA}\n"]
    for one in settings:
        value = values[one.name]
        same = value == one.default
        lines.append(f"# {one.help}" if one.help else "")
        key = one.flag[2:]
        lines.append(f"# {key} =" if value is None else f"{'# ' * same}{key} = {_toml(value)}")
    return "\n".join(line for line in lines if line) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def write(path: str, text: str) -> None:
    """To a file, or to standard output for `-`. Raises ConfigError where there is one already."""
    if path == "-":
        click.echo(text, nl=False)
        return
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"--write-config {path}: {error.strerror}; give a new name, or - for standard output"
        ) from error
