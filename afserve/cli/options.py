"""Option types that several commands share."""

import tomllib
from pathlib import Path

import click

from afserve.config_ranges import Range
from afserve.errors import ConfigError, shown

existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)


_LONGEST = 64  # characters of a number


class Within(click.ParamType[int | float]):
    """A number of a range; NaN, infinity and numbers without end are in none. Raises ConfigError naming the option."""

    def __init__(self, low: float, high: float, *, whole: bool = False) -> None:
        self.range = Range(low, high, whole)
        self.name = "integer" if whole else "float"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        number = self.number(value)
        if number is not None and self.range.holds(number):
            return number
        name = param.opts[-1] if param is not None and param.opts else "a number"
        said = value if number is None else number
        raise ConfigError(f"{name}: {shown(said)} is not {self.range}", param=param.name if param else None)

    def number(self, value: object) -> int | float | None:
        """None where it is none; its range is not looked at."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if not isinstance(value, str) or len(value) > _LONGEST:
            return None
        try:
            return int(value) if self.range.whole else float(value)
        except ValueError:
            return None


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
