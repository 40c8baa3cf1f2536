"""Option types that several commands share."""

import tomllib
from pathlib import Path

import click

from afserve.errors import ConfigError

existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)


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
