"""Option types that several commands share, the files that they name, and options that travel in groups."""

import dataclasses
import functools
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from afserve.config_ranges import Range
from afserve.errors import ConfigError, shown
from afserve.json_file import CONFIG_BYTES

Command = TypeVar("Command", bound=Callable[..., Any])
Group = TypeVar("Group")
_OPTION = "option"
existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)
MOST_BYTES = 2 << 30  # of a trace or of prompts: twice a public trace of a week
_PART = 16 << 20


def read_given_bytes(path: Path, where: str, most: int = MOST_BYTES) -> bytes:
    """All of a file that somebody named, or of a pipe. Raises ConfigError that begins with `where`, as "--trace x.csv":
    the file cannot be read or holds more than `most` bytes, which its size tells before it is read."""
    parts: list[bytes] = []
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size  # of a pipe or a device 0
            while size <= most and (part := file.read(_PART)):
                parts.append(part)
                size = max(size, sum(map(len, parts)))
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    if size > most:
        raise ConfigError(f"{where}: has more than {most:,} bytes, which is the most that is read")
    return b"".join(parts)


def read_given_text(path: Path, where: str, most: int = MOST_BYTES) -> str:
    """As `read_given_bytes`, of UTF-8 text."""
    try:
        return read_given_bytes(path, where, most).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: is not UTF-8 text: {error.reason} at byte {error.start:,}") from error


def read_given_toml(path: Path, where: str = "") -> dict[str, Any]:
    """As `read_given_text`, of at most 8 MiB of TOML. Without `where` errors begin with the path."""
    where = where or str(path)
    try:
        return tomllib.loads(read_given_text(path, where, CONFIG_BYTES))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from error


class _OutputFile(click.Path):
    """A file for what a command finds. Raises ConfigError before the work where it is a folder or has none to be in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.is_dir() or not path.absolute().parent.is_dir():
            why = f"there is no folder {shown(str(path.parent))}; make it first"
            name = param.opts[-1] if param is not None else "the output"
            raise ConfigError(
                f"{name} {shown(str(path))}: {'it is a folder' if path.is_dir() else why}",
                param=param.name if param is not None else None,
            )
        return path


output_file = _OutputFile(path_type=Path)
_LONGEST = 64  # characters of a number


class Within(click.ParamType[int | float]):
    """A number of a range; NaN, infinity and numbers without end are in none. Raises ConfigError naming the option."""

    def __init__(self, low: float, high: float, *, whole: bool = False) -> None:
        self.range = Range(low, high, whole)
        self.name = "integer" if whole else "float"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        number = self.read_number(value)
        if number is not None and self.range.holds(number):
            return number
        name = param.opts[-1] if param is not None and param.opts else "a number"
        said = value if number is None else number
        raise ConfigError(f"{name}: {shown(said)} is not {self.range}", param=param.name if param else None)

    def read_number(self, value: object) -> int | float | None:
        """None where it is none; its range is not looked at."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if not isinstance(value, str) or len(value) > _LONGEST or not value.isascii() or "_" in value:
            return None
        try:
            return int(value) if self.range.whole else float(value)
        except ValueError:
            return None


def option(*names: str, default: Any = None, **attributes: Any) -> Any:
    """A field of a frozen dataclass, declared as click would have it; its flag is the field's name if none is given."""
    if default is not None:
        attributes["default"] = default
    return dataclasses.field(metadata={_OPTION: (names, attributes)})


def declare_options(*groups: type) -> Callable[[Command], Command]:
    """An option for each field of the groups, in their order."""

    def declared(command: Command) -> Command:
        for group in reversed(groups):
            for field in reversed(dataclasses.fields(group)):
                names, attributes = field.metadata[_OPTION]
                spelled = names or (f"--{field.name.replace('_', '-')}",)
                click.option(*spelled, field.name, **attributes)(command)
        return command

    return declared


def gather_group(group: type[Group], flags: dict[str, Any]) -> Group:
    """Takes a group's values out of what click read."""
    return group(**{field.name: flags.pop(field.name) for field in dataclasses.fields(group)})  # type: ignore[arg-type]


def group_options(*groups: type) -> Callable[[Command], Command]:
    """As `declare_options`; and the command is called with an instance of each group in place of its fields."""

    def grouped(command: Command) -> Command:
        @functools.wraps(command)
        def with_groups(*others: object, **flags: Any) -> Any:
            return command(*others, *[gather_group(group, flags) for group in groups], **flags)

        return declare_options(*groups)(with_groups)  # type: ignore[return-value]

    return grouped
