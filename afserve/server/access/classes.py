"""Classes of service, by the operator's names: who has its turn first, which share it has, and in what times answers
should come. From a TOML file; requests choose one by a field, or their key does.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from afserve.config_ranges import Range
from afserve.control.pilot.classes import ClassAim
from afserve.engine.scheduling.request import MAX_PRIORITY, MAX_RETAIN, MAX_SHARE
from afserve.errors import ConfigError, RequestError, shown
from afserve.json_file import read_text
from afserve.server.access.key_file import NAME
from afserve.server.bodies.declared import LONGEST_SECONDS, Scheduling

MOST_BYTES, MOST_CLASSES = 64 << 10, 64
FIELD = "service_class"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_SECONDS = Range(0.0001, LONGEST_SECONDS, whole=False)
_RANGES: Mapping[str, Range] = {
    "priority": Range(-MAX_PRIORITY, MAX_PRIORITY),
    "weight": Range(1, MAX_SHARE),
    "ttft": _SECONDS,
    "tpot": _SECONDS,
    "retain": Range(0, MAX_RETAIN, whole=False),
}


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """Requests of the lowest `priority` come first, and take the room of later ones where it is scarce. Of those of one
    priority a class has `weight` times the share of its key. `ttft` and `tpot` in seconds are what its answers are
    judged by; with `refuse_late` a request that would miss them is refused at once. What its requests leave in a cache
    is kept for `retain` seconds. With `keys` it is theirs alone, and theirs where they name none."""

    name: str
    priority: int = 0
    weight: int = 1
    ttft: float | None = None
    tpot: float | None = None
    refuse_late: bool = False
    retain: float = 0.0
    keys: tuple[str, ...] = ()

    @property
    def aim(self) -> ClassAim:
        """What a pilot keeps of it."""
        never = float("inf")
        return ClassAim(self.name, self.priority, self.ttft or never, self.tpot or never)

    def applied(self, asked: Scheduling, later: int = 0) -> Scheduling:
        """A request may come `later` than its class, not sooner, and ask for other times and a longer stay."""
        own = asked.ttft is not None or asked.tpot is not None
        return replace(
            asked,
            service_class=self.name,
            priority=min(MAX_PRIORITY, self.priority + max(0, later)),
            share=min(MAX_SHARE, asked.share * self.weight),
            tenant=f"{asked.tenant}/{self.name}",
            ttft=asked.ttft or self.ttft,
            tpot=asked.tpot or self.tpot,
            refuses_late=self.refuse_late or own,
            retain=max(asked.retain, self.retain),
        )


class ServiceClasses:
    def __init__(self, classes: Sequence[ServiceClass] = ()) -> None:
        self._named = {one.name: one for one in classes}
        self._of_key = {key: one for one in classes for key in one.keys}

    @property
    def all(self) -> tuple[ServiceClass, ...]:
        return tuple(self._named.values())

    def class_of(self, asked: str, key: str) -> ServiceClass | None:
        """By the name that a request gives, else its key's; None for a request of no class. Raises RequestError."""
        if not asked:
            return self._of_key.get(key)
        if (found := self._named.get(asked)) is None:
            known = (
                f"is none of {', '.join(self._named)}"
                if self._named
                else "is not there: no --classes were given"
            )
            raise RequestError.about(FIELD, f"{shown(asked)} {known}; leave it out, or name one of them")
        if found.keys and key not in found.keys:
            raise RequestError.about(
                FIELD, f"{shown(asked)} is for other keys; leave it out, or name another one"
            )
        return found


def read_classes(path: str | Path) -> ServiceClasses:
    """Raises ConfigError that names the class and the field."""
    try:
        tables = tomllib.loads(read_text(Path(path), MOST_BYTES, ConfigError))
    except tomllib.TOMLDecodeError as error:
        raise _refused(path, f"is not TOML: {error}") from error
    if not tables or len(tables) > MOST_CLASSES:
        raise _refused(path, f"has {len(tables)} tables [NAME], 1 to {MOST_CLASSES} are read")
    classes = [_class(path, name, table) for name, table in tables.items()]
    owner: dict[str, str] = {}
    for one in classes:
        for key in one.keys:
            if (other := owner.setdefault(key, one.name)) != one.name:
                raise _refused(
                    path, f"{shown(key)} is a key of {other} and of {one.name}; give it to one of them"
                )
    return ServiceClasses(classes)


def _class(path: str | Path, name: str, table: object) -> ServiceClass:
    if not _NAME.fullmatch(name) or not isinstance(table, Mapping):
        raise _refused(
            path, f"{shown(name)}: is no table [NAME] with at most 32 letters, digits, '.', '_', '-'"
        )
    known = [field.name for field in fields(ServiceClass) if field.name != "name"]
    for field, value in table.items():
        if field not in known:
            raise _refused(path, f"[{name}] {shown(field)}: is none of {', '.join(known)}")
        if field in _RANGES and not _RANGES[field].holds(value):
            raise _refused(path, f"[{name}] {field}: {shown(value)} is not {_RANGES[field]}")
        if field == "refuse_late" and not isinstance(value, bool):
            raise _refused(path, f"[{name}] {field}: {shown(value)} is neither true nor false")
    keys = table.get("keys", [])
    if not isinstance(keys, list) or not all(isinstance(key, str) and NAME.fullmatch(key) for key in keys):
        raise _refused(path, f'[{name}] keys: {shown(keys)} is no list of names of keys, such as ["alice"]')
    return ServiceClass(name, **{**table, "keys": tuple(keys)})


def _refused(path: str | Path, why: str) -> ConfigError:
    return ConfigError.about("classes", f"{path}: {why}")
