"""A JSON body read field by field: the right type and range, or a RequestError that names the field.

Fields nobody asks for are ignored; null is the same as absent. Knows no endpoint.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeVar, cast

from afserve.errors import RequestError, shown

T = TypeVar("T")
# CPython reads no longer integers from text: reading them takes the square of their length.
MOST_DIGITS = 4300
MAX_SECTIONS = 8192  # objects of an array, such as messages or their parts, where nothing else is said
_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def parse_object(body: bytes) -> dict[str, object]:
    """The request body as a JSON object. NaN, Infinity and anything that is not UTF-8 JSON are refused."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise _named(body, error) from error
    if not isinstance(value, dict):
        raise RequestError(f"the body is {kind_of(value)}, it must be a JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class _NoNumber(str):
    """What stands where a number should, in words."""


def _whole(digits: str) -> object:
    many = len(digits) > MOST_DIGITS
    return _NoNumber(f"an integer of {len(digits)} digits is not accepted") if many else int(digits)


def _named(body: bytes, error: Exception) -> RequestError:
    """The refusal of what Python's JSON takes for no number: it names the field, which takes a second reading."""
    try:
        value = json.loads(
            body, parse_constant=lambda name: _NoNumber(f"{name} is not JSON"), parse_int=_whole
        )
    except (ValueError, RecursionError):
        return RequestError(f"the body is not valid JSON: {error}")
    path, odd = _first_odd(value)
    return RequestError(f"{path}: {odd}", param=path or None)


def _first_odd(value: object) -> tuple[str, str]:
    waiting = [("", value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _NoNumber):
            return path, value
        if isinstance(value, dict):
            waiting += [(f"{path}.{key[:64]}" if path else key[:64], item) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    return "", "the body is not valid JSON"


def kind_of(value: object) -> str:
    if value in ("", [], {}):
        return f"an empty {_NAMES[type(value)].split()[-1]}"
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)


def refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise RequestError.about(name, f"is {kind_of(value)}, it must be {wanted}")


class Fields:
    """One JSON object. `path` prefixes the names in errors, such as `messages[2]`.

    `passed` are the wishes that nobody follows, each with what to do instead; a body and its parts share them.
    """

    def __init__(
        self, values: Mapping[str, object], path: str = "", passed: dict[str, str] | None = None
    ) -> None:
        self._values = values
        self.path = path
        self.passed = {} if passed is None else passed

    def path_of(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> object:
        return self._values.get(key)

    def given(self, *keys: str) -> dict[str, object]:
        """Those of these that are there."""
        return {key: value for key in keys if (value := self.get(key)) is not None}

    def refuse_field(self, key: str, wanted: str) -> NoReturn:
        refuse(self.path_of(key), self.get(key), wanted)

    def refusal(self, key: str, why: str) -> RequestError:
        """For a value that has the right type."""
        return RequestError.about(self.path_of(key), why)

    def pass_over(self, name: str, instead: str) -> None:
        """Notes a wish that is not followed, by its whole name."""
        self.passed.setdefault(name, instead)

    @staticmethod
    def parsed(text: str, name: str) -> object:
        """JSON that stands in a string. Raises RequestError naming the field."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError.about(name, f"not valid JSON: {error}") from error

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            self.refuse_field(key, "a string")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse_field(key, "true or false")
        return value

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse_field(key, "an integer")
        self._in_range(key, value, low, high)
        return value

    def real(self, key: str, low: float, high: float) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse_field(key, "a number")
        self._in_range(key, value, low, high)
        return float(value)

    def entries(self, key: str, most: int) -> int:
        """How many an array or an object has. Raises RequestError where they are more than `most`."""
        value = self.get(key)
        count = len(value) if isinstance(value, list | dict) else 0
        if count > most:
            raise self.refusal(key, f"has {count} entries, at most {most} are allowed")
        return count

    def section(self, key: str) -> "Fields | None":
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse_field(key, "an object")
        return Fields(value, self.path_of(key), self.passed)

    def array(self, key: str) -> Sequence[object] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            self.refuse_field(key, "an array")
        return value

    def sections(self, key: str, most: int = MAX_SECTIONS) -> tuple["Fields", ...]:
        """An array of at most `most` objects; it is counted before any of them is looked at."""
        self.entries(key, most)
        return tuple(
            Fields(item, f"{self.path_of(key)}[{i}]", self.passed)
            if isinstance(item, dict)
            else refuse(f"{self.path_of(key)}[{i}]", item, "an object")
            for i, item in enumerate(self.array(key) or ())
        )

    def integers(self, key: str) -> tuple[int, ...]:
        return token_ids(self.array(key) or (), self.path_of(key))

    def texts(self, key: str, most: int) -> tuple[str, ...]:
        """A string or an array of at most `most` strings."""
        value = self.get(key)
        items = [value] if isinstance(value, str) else self.array(key) or ()
        self.entries(key, most)
        return tuple(
            item if isinstance(item, str) else refuse(f"{self.path_of(key)}[{i}]", item, "a string")
            for i, item in enumerate(items)
        )

    def raw(self) -> Mapping[str, object]:
        return self._values

    def _in_range(self, key: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            raise self.refusal(key, f"{shown(value)} is outside [{low}, {high}]")


def token_ids(items: Sequence[object], name: str) -> tuple[int, ...]:
    # Types first, all at once: a prompt may have a million ids, and the event loop waits.
    if set(map(type, items)) <= {int}:
        return cast(tuple[int, ...], tuple(items))
    odd = next(i for i, item in enumerate(items) if type(item) is not int)
    return refuse(f"{name}[{odd}]", items[odd], "an integer")


def or_else(value: T | None, default: T) -> T:
    return default if value is None else value
