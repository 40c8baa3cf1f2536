"""Typed reading of one table that came from a TOML or JSON file, with errors that name source, key and value.

It opens no file: the caller passes what it parsed and the name to show.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from afserve.errors import ConfigError, shown


def nearest(name: str, known: Iterable[str]) -> str:
    """'did you mean a, b?' or, when nothing is near, the whole list."""
    names = sorted(known)
    close = get_close_matches(name.lower(), names, n=3, cutoff=0.4)
    return f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(names)}."


MOST = 1e18  # of a number; bytes per second of any machine


class TableFields:
    """A read-only view of a table; every getter checks type and range."""

    def __init__(self, source: str, table: Mapping[str, object]) -> None:
        self.source = source
        self.table = table

    def has(self, key: str) -> bool:
        return self.table.get(key) is not None

    def number(self, key: str, default: float | None = None, *, least: float = 0.0) -> float:
        value = self.table.get(key)
        if value is None:
            return float(self._default(key, default))
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, "must be a number")
        if not value >= least:
            raise self.refuse(key, f"must be at least {least:g}")
        if value > MOST:
            raise self.refuse(key, f"must be at most {int(MOST)}")
        return float(value)

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        value = self.number(key, default, least=least)
        if value != int(value):
            raise self.refuse(key, "must be a whole number")
        return int(value)

    def refuse(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"{self.source}: {key} {why}, not {shown(self.table.get(key))}", param=key)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.table.get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "must be a string")
        return value

    def items(self, key: str) -> list[object]:
        """Of a list; none where it is absent or null."""
        value = self.table.get(key)
        if value is not None and not isinstance(value, list | tuple):
            raise self.refuse(key, "must be a list")
        return list(value or ())

    def section(self, key: str) -> "TableFields":
        value = self.table.get(key)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.source}: [{key}] is missing or not a table", param=key)
        return TableFields(f"{self.source}: [{key}]", value)

    def _default(self, key: str, default: float | None) -> float:
        if default is None:
            raise ConfigError(f"{self.source}: {key} is missing", param=key)
        return default
