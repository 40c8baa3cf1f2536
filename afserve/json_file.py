"""Reads a file that holds one JSON object, as checkpoint folders have them, and refuses what is none by its name.

The size is looked at before anything is read, so that a hostile file costs neither time nor memory. It knows no
field; `config_json` and `placement/planner/perf/fields` check those.
"""

import json
import os
import stat
from pathlib import Path

from afserve.errors import CheckpointError, UserError, shown

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
