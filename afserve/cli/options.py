"""Option types that several commands share."""

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
