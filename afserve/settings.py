"""A setting is declared once: a field of a frozen dataclass, with its help text and the values it may have.

A group is such a dataclass. The command line makes flags, environment variables and keys of a config file from it
(`cli/settings.py`), `LLM` makes keywords, the wire carries it by names, and the group checks itself. Nothing here knows
a command line, the environment or a wire.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from afserve.config_ranges import Range
from afserve.errors import ConfigError, shown

Group = TypeVar("Group")
Function = TypeVar("Function", bound=Callable[..., Any])
_HELP = "help"


class FileUse(Enum):
    """How a setting's file is used."""

    READ = "read"  # it exists
    WRITTEN = "written"
    FOLDER = "folder"  # it exists, with files in it


TOPICS = {
    "model": "which model, and in which numbers",
    "nodes": "how many of each kind, and what they compute",
    "kv": "the KV cache, its copies, memory and disk",
    "placement": "replicas of experts, and how they follow the traffic",
    "losses": "lost nodes, and changes while serving",
    "cluster": "other hosts: transports, certificates, ssh",
    "ray": "nodes on a Ray cluster",
    "http": "addresses, names, TLS, keys, web pages",
    "limits": "sizes, counts and deadlines of requests",
    "logs": "logs, traces, metrics, recordings",
}
"""What settings are about, as `--help TOPIC` shows them: a setting names its topic, or its group does as TOPIC."""

Allowed = Range | tuple[str, ...] | FileUse | None
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    tuple: "a list",
}


@dataclass(frozen=True, slots=True)
class DeclaredSetting:
    """One declaration. `allowed` None: its limits depend on the model or the machine, and are checked there.

    `metavar` stands for the value in a help text, which shows the range where `shows_range` says so. `bare` is the
    value of a flag that is given without one; None: it needs one. `topic` is one of TOPICS. `common`: the first help
    shows it.
    """

    name: str
    kind: type
    default: object
    help: str
    allowed: Allowed = None
    metavar: str | None = None
    shows_range: bool = False
    bare: str | None = None
    topic: str = ""
    common: bool = False

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    def check(self, value: object, spelled: str) -> None:
        """Raises ConfigError with the setting as the user spelled it, the value and what it may be."""
        if value is None and self.default is None:
            return
        if isinstance(self.allowed, tuple):
            fine, wanted = value in self.allowed, f"not one of {', '.join(self.allowed)}"
        elif isinstance(self.allowed, Range):
            fine, wanted = self.allowed.holds(value), _missed(value, self.allowed)
        else:
            fine = isinstance(value, self.kind) and (self.kind is bool or not isinstance(value, bool))
            wanted = f"not {_KINDS[self.kind]}"
        if not fine:
            raise ConfigError(f"{spelled}: {shown(value)} is {wanted}", param=self.name)


def _missed(value: object, allowed: Range) -> str:
    kind = int if allowed.whole else int | float
    number = isinstance(value, kind) and not isinstance(value, bool)
    return f"outside [{allowed.low}, {allowed.high}]" if number else f"not {allowed}"


def setting(
    default: Any,
    help: str,
    allowed: Allowed = None,
    *,
    metavar: str | None = None,
    shows_range: bool = False,
    bare: str | None = None,
    topic: str = "",
    common: bool = False,
) -> Any:
    """The field of a group; `dataclasses.MISSING` for one without a default. `topic` empty: that of the group."""
    notes = {_HELP: help, "allowed": allowed, "metavar": metavar, "shows_range": shows_range, "bare": bare}
    notes |= {"topic": topic, "common": common}
    return dataclasses.field(default=default, metadata=notes)


def settings_of(group: type) -> tuple[DeclaredSetting, ...]:
    """In the order of the fields. A group may have fields that nobody sets: those are not declared."""
    own = str(getattr(group, "TOPIC", ""))
    found = (field for field in dataclasses.fields(group) if _HELP in field.metadata)
    return tuple(
        DeclaredSetting(
            f.name, _kind(f.type), f.default, **{**f.metadata, "topic": f.metadata["topic"] or own}
        )
        for f in found
    )


def check(group: object, spelled: Callable[[str], str] = str) -> None:
    """For `__post_init__`. Raises ConfigError on the first value that its declaration does not allow."""
    for one in settings_of(type(group)):
        one.check(getattr(group, one.name), spelled(one.name))


def build(group: type[Group], values: Mapping[str, Any]) -> Group:
    """Raises ConfigError naming a value that is no setting of the group."""
    known = {field.name for field in dataclasses.fields(group)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigError(f"{name} is not one of {', '.join(sorted(known))}", param=name)
    return group(**values)


def keywords(*groups: type, only: Collection[str] = ()) -> Callable[[Function], Function]:
    """For a function whose `**` are settings of groups: its signature shows them by name, type and default.

    `only` these are, where some are named.
    """
    new = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        for group in groups
        for field in dataclasses.fields(group)
        if not only or field.name in only
    ]

    def named(function: Function) -> Function:
        whole = inspect.signature(function)
        kept = [p for p in whole.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = whole.replace(parameters=[*kept, *new])  # type: ignore[attr-defined]
        return function

    return named


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def in_range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{key}: {shown(value)} is outside [{low}, {high}]", param=key)


def _kind(annotation: Any) -> type:
    """The class of a value: `int` of `int | None`, `tuple` of `tuple[str, ...]`."""
    if get_origin(annotation) is tuple:
        return tuple
    kinds = [part for part in get_args(annotation) if part is not NoneType] or [annotation]
    assert len(kinds) == 1 and kinds[0] in _KINDS, annotation
    found: type = kinds[0]
    return found
