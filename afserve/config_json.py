"""Typed access to a Hugging Face `config.json`, with errors that name the file, the field and the value."""

from collections.abc import Mapping

from afserve.errors import CheckpointError

Config = Mapping[str, object]


class ConfigFields:
    """Typed access to a config with errors that name file, field and value."""

    def __init__(self, config: Config, where: str) -> None:
        self.config = config
        self.where = where

    def integer(self, *names: str, default: int | None = None, low: int = 0) -> int:
        name, value = self._find(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 1 << 40:
            raise CheckpointError(f"{self.where}: {name}: {value!r} is not a whole number of at least {low}")
        return value

    def optional(self, *names: str) -> int | None:
        for name in names:
            if self.config.get(name) is not None:
                return self.integer(name)
        return None

    def number(self, *names: str, default: float | None = None) -> float:
        name, value = self._find(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.where}: {name}: {value!r} is not a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name}: {value!r} is not true or false")
        return value

    def section(self, name: str) -> Config:
        value = self.config.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {name}: {value!r} is not an object")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.config.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) for i in ids):
            raise CheckpointError(f"{self.where}: {name}: {value!r} is not a token id or a list of them")
        return tuple(ids)

    def refuse(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name}: {self.config.get(name)!r} {why}")

    def _find(self, names: tuple[str, ...], default: object) -> tuple[str, object]:
        for name in names:
            if self.config.get(name) is not None:
                return name, self.config[name]
        if default is None:
            raise CheckpointError(f"{self.where}: {names[0]}: missing")
        return names[0], default
