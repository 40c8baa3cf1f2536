"""Lines of an audit log as a chain: each has a hash over itself and the hash of the line before, in one file or in
several that follow each other. Knows no server."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

START = "0" * 64  # before the first line of all
MOST_LINE = 1 << 20  # bytes


def chained(entry: Mapping[str, object], before: str) -> bytes:
    """The line of an entry behind the one with this hash."""
    body = {**entry, "before": before}
    return _line(body, _hash(body))


def hash_of(line: bytes) -> str | None:
    """None where it is no line of a log."""
    try:
        return str(json.loads(line)["hash"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Checked:
    """Of so many lines the last hash. `broken`: the file and the number in it, from 1, of the first line that does not
    follow from those before, and why; None where all do. `behind`: lines after the one with the hash that was asked
    for; None where no line has it."""

    lines: int
    last: str
    broken: tuple[Path, int, str] | None = None
    behind: int | None = None


def check_chain(paths: Sequence[Path], after: str = START, known: str = START) -> Checked:
    """Files in the order in which they were written; the first one goes on behind the hash `after`. Raises OSError.
    Lines that are missing at the end show only where `known`, the hash of a line that was there, is given."""
    count, before = 0, after
    seen = 0 if known in (after, START) else None
    for path in paths:
        for number, line in enumerate(_lines(path), 1):
            if why := _fault(line, before):
                return Checked(count, before, (path, number, why), None if seen is None else count - seen)
            count, before = count + 1, hash_of(line) or START
            if before == known:
                seen = count
    return Checked(count, before, None, None if seen is None else count - seen)


def _lines(path: Path) -> Iterator[bytes]:
    """What is longer than a line may be comes in parts, which are none."""
    with path.open("rb") as file:
        while line := file.readline(MOST_LINE):
            yield line


def _fault(line: bytes, before: str) -> str:
    """Of a line that is not what `chained` writes behind that hash, to the byte."""
    if not line.endswith(b"\n"):
        return "is longer than a line may be" if len(line) == MOST_LINE else "is cut off: its end is missing"
    try:
        entry = json.loads(line)
        told = entry.pop("hash")
        if entry.get("before") != before:
            return "does not follow the line before it"
        return "" if told == _hash(entry) and _line(entry, told) == line else "was changed"
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return "is no entry"


def _hash(body: Mapping[str, object]) -> str:
    return hashlib.sha256(_encoded(body)).hexdigest()


def _line(body: Mapping[str, object], own: str) -> bytes:
    return _encoded({**body, "hash": own}) + b"\n"


def _encoded(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
