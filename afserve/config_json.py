"""Typed access to a Hugging Face `config.json`, with errors that name the file, the field, the value and its range."""

import json
from collections.abc import Mapping
from types import MappingProxyType

from afserve.config_ranges import MOST_TOKEN_IDS, RANGES, Range
from afserve.errors import CheckpointError, UserError, shown

Config = Mapping[str, object]


class ConfigFields:
    """A read-only view of a config. A number's range is its row of `RANGES`, whichever reader asks for it.

    Whatever is wrong raises `refusal`: CheckpointError for who serves the model, ConfigError for who plans with it.
    """

    def __init__(
        self,
        config: Config,
        where: str,
        refusal: type[UserError] = CheckpointError,
        called: Mapping[str, str] | None = None,
    ) -> None:
        """`called`: names of fields that this config.json has under another name."""
        self.config = config
        self.where = where
        self.refusal = refusal
        self.called = called or {}

    def has(self, name: str) -> bool:
        return self.config.get(name) is not None

    def inner(self, config: Config, name: str) -> "ConfigFields":
        """A view of a section of this config, under its own name."""
        return ConfigFields(config, f"{self.where}: {name}", self.refusal)

    def view(self, values: Config, called: Mapping[str, str] = MappingProxyType({})) -> "ConfigFields":
        """The same fields, but for these, which config.json may have under other names."""
        return ConfigFields({**self.config, **values}, self.where, self.refusal, {**self.called, **called})

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there. Raises the refusal on any other value than one of its range."""
        return int(self._number(names, default))

    def optional(self, *names: str) -> int | None:
        """None where it is absent or null."""
        return self.integer(*names) if any(map(self.has, names)) else None

    def number(self, *names: str, default: float | None = None) -> float:
        return float(self._number(names, default))

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "is not true or false")
        return value

    def known_only(self, name: str, *known: object) -> None:
        """Refuses a variant that is not computed: any value but these, where there is one."""
        value = self.config.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in known):
            told = (
                f"; supported: {', '.join(json.dumps(one) for one in known)}" if known else "; leave it out"
            )
            raise self.refuse(name, f"is not supported{told}")

    def section(self, name: str) -> Config:
        value = self.config.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.refuse(name, "is not an object")
        return value

    def integers(self, name: str, each: Range, most: int) -> tuple[int, ...]:
        """A list of at most `most`; empty where it is absent or null."""
        value = self.config.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > most or not all(each.holds(item) for item in value):
            raise self.refuse(name, f"is not a list of at most {most} numbers, each {each}")
        return tuple(value)

    def reals(self, name: str, each: Range, most: int) -> tuple[float, ...]:
        """The same for numbers of any kind that `each` allows."""
        return tuple(map(float, self.integers(name, each, most)))

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One id or several; none where it is absent or null."""
        value = self.config.get(name)
        one, each = not isinstance(value, list), Range(0, vocab_size - 1)
        ids = [] if value is None else [value] if one else list(value)  # type: ignore[call-overload]
        if len(ids) > MOST_TOKEN_IDS or not all(each.holds(item) for item in ids):
            raise self.refuse(
                name,
                f"is not a token id below vocab_size {vocab_size}, nor a list of at most {MOST_TOKEN_IDS} of them",
            )
        return tuple(ids)

    def items(self, name: str, most: int, by: str = "") -> list[object]:
        """A list of at most `most` of anything, `by` the field that says how many; empty where it is absent or null."""
        value = self.config.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            bound = f"{by}, {most}" if by else str(most)
            raise self.refuse(name, f"is not a list of at most {bound}")
        return list(value)

    def refuse(self, name: str, why: str) -> UserError:
        return self.error(f"{name}: {shown(self.config.get(name))} {why}", name)

    def error(self, why: str, name: str) -> UserError:
        """For what is wrong with more than one field; `name` is the one to look at first."""
        own = [f"{new} is {old} here" for new, old in self.called.items() if new in why]
        told = f" ({', '.join(own)})" if own else ""
        return self.refusal(f"{self.where}: {why}{told}", param=name)

    def _number(self, names: tuple[str, ...], default: float | None) -> float:
        """Defaults are checked as well: some are computed from other fields."""
        name, value = self._find(names, default)
        if not RANGES[name].holds(value):
            raise self.error(f"{name}: {shown(value)} is not {RANGES[name]}", name)
        return value  # type: ignore[return-value]

    def _find(self, names: tuple[str, ...], default: object) -> tuple[str, object]:
        for name in names:
            if self.config.get(name) is not None:
                return name, self.config[name]
        if default is None:
            raise self.error(f"{names[0]}: missing", names[0])
        return names[0], default
