"""Reads a file that holds one JSON object, as checkpoint folders have them, or a setting that is written as one, and
refuses what is none by its name.

The size is looked at before anything is read, so that a hostile file costs neither time nor memory. It knows no
field; `config_json` and `placement/planner/perf/fields` check those.
"""

import difflib
import json
import os
import stat
from collections.abc import Collection
from pathlib import Path

from afserve.errors import CheckpointError, ConfigError, UserError, shown

CONFIG_BYTES = 8 << 20  # config.json and its like: the largest published ones have 2 MiB
LIST_BYTES = 256 << 20  # a tokenizer's vocabulary, an index of a million tensors
Refusal = type[UserError]


def read_object(
    path: Path, most: int = CONFIG_BYTES, refusal: Refusal = CheckpointError, *, once: bool = False
) -> dict[str, object]:
    """Raises `refusal`, naming the file, where it is missing, larger than `most` bytes or not a JSON object, or says a
    key twice that has to be there `once`."""
    value = parse(read_text(path, most, refusal), str(path), refusal, once=once)
    if not isinstance(value, dict):
        raise refusal(f"{path}: a JSON object was expected, found {type(value).__name__}")
    return value


def read_text(path: Path, most: int = CONFIG_BYTES, refusal: Refusal = CheckpointError) -> str:
    """The UTF-8 text of a plain file of at most `most` bytes."""
    try:
        return _bytes(path, most, refusal).decode()
    except FileNotFoundError as error:
        raise refusal(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise refusal(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start:,}") from error
    except OSError as error:
        raise refusal(f"{path}: cannot be read: {error.strerror}") from error


def parse(text: str, where: str, refusal: Refusal = CheckpointError, *, once: bool = False) -> object:
    """Any JSON value. Raises `refusal` that begins with `where`. Of a key that an object has twice the last value
    counts, unless it has to be there `once`."""
    try:
        return json.loads(text, object_pairs_hook=_each_once if once else None)
    except _Twice as error:
        raise refusal(f"{where}: {shown(str(error))} is there twice; which one counts is not said") from error
    except json.JSONDecodeError as error:
        raise refusal(f"{where}: cannot be read as JSON: {error}") from error
    except ValueError as error:  # Python refuses to convert integers of more than 4,300 digits
        raise refusal(f"{where}: cannot be read as JSON: an integer has too many digits") from error
    except RecursionError as error:
        raise refusal(f"{where}: cannot be read as JSON: it is nested too deeply") from error


def read_setting(text: str, flag: str, known: Collection[str], most: int, example: str) -> dict[str, object]:
    """What a flag says as a JSON object with `known` keys, each once; those that are null are left out. Raises
    ConfigError that begins with `flag`, with the nearest key to one that nobody knows; `most` characters are read."""
    if len(text) > most:
        raise ConfigError(f"{flag}: has {len(text)} characters, at most {most} are read")
    try:
        value = parse(text, flag, ConfigError, once=True)
    except ConfigError as error:
        raise ConfigError(f"{error.message}; write it like {example}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag}: {shown(value)} is no JSON object; write it like {example}")
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            raise ConfigError(f"{flag}: {shown(name)} is no key of it; the nearest is {near[0]}")
    return {name: item for name, item in value.items() if item is not None}


class _Twice(Exception):
    """A key."""


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made: dict[str, object] = {}
    for key, value in pairs:
        if key in made:
            raise _Twice(key)
        made[key] = value
    return made


def _bytes(path: Path, most: int, refusal: Refusal) -> bytes:
    """Opened without waiting: a pipe that nobody writes to is refused like any other file that is not plain."""
    with open(path, "rb", opener=_without_waiting) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise refusal(f"{path}: is not a plain file")
        if found.st_size > most:
            raise refusal(f"{path}: has {found.st_size:,} bytes, at most {most:,} are read")
        data = file.read(most + 1)
    if len(data) > most:
        raise refusal(f"{path}: grew beyond {most:,} bytes while it was read")
    return data


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
