"""`afserve plan --compare A.json B.json`: two answers of `--json` side by side, what changed and by how much."""

from collections.abc import Mapping
from pathlib import Path

from afserve.errors import ConfigError
from afserve.json_file import read_object

_NUMBERS = (
    ("TPOT ms", "tpot_ms"),
    ("tok/s", "tok_s"),
    ("tok/s per device", "tok_s_per_device"),
    ("$/Mtok", "usd_per_mtok"),
    ("$/h", "usd_per_hour"),
)
_LEAST, _MOST = 1e-9, 1e18  # of these
_COUNT, _LONGEST = 1 << 40, 200  # devices or requests; characters of a name


def compared(first: Path, second: Path) -> str:
    """A table of the best plans of both files, and both verdicts. Raises ConfigError naming the file."""
    answers = [(path, read_object(path, refusal=ConfigError)) for path in (first, second)]
    left, right = (_best(path, answer) for path, answer in answers)
    rows: list[tuple[str, ...]] = []
    for label, key in _NUMBERS:
        before, after = _number(first, left, key), _number(second, right, key)
        rows.append((label, f"{before:,.3f}", f"{after:,.3f}", f"{after / before - 1:+.1%}"))
    heading = ("", first.name, second.name, "change")
    rows = [heading, ("plan", _words(first, left), _words(second, right), ""), *rows]
    rows.append(("AFD is better with", *(_chance(path, answer) for path, answer in answers), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _best(path: Path, answer: Mapping[str, object]) -> Mapping[str, object]:
    best = answer.get("best")
    if not isinstance(best, Mapping):
        raise _refusal(path, "it has no best plan")
    return best


def _number(path: Path, best: Mapping[str, object], key: str) -> float:
    value = best.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value <= _MOST:
        raise _refusal(path, f"best.{key} is not a number of {_LEAST:g} to {_MOST:g}")
    return float(value)


def _words(path: Path, best: Mapping[str, object]) -> str:
    kind = _word(path, best, "best", "kind")
    sides = [
        _side(path, best, side) for side in (("attention", "experts") if kind == "afd" else ("attention",))
    ]
    batch = _count(path, best, "best", "batch")
    return f"{kind} {' + '.join(sides)}, batch {batch}, {_word(path, best, 'best', 'engine')}"


def _side(path: Path, best: Mapping[str, object], key: str) -> str:
    side = best.get(key)
    if not isinstance(side, Mapping):
        raise _refusal(path, f"best.{key} is no object")
    where = f"best.{key}"
    return f"{_count(path, side, where, 'devices')} {_word(path, side, where, 'hardware')}"


def _word(path: Path, table: Mapping[str, object], where: str, key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise _refusal(path, f"{where}.{key} is not a name of at most {_LONGEST} characters")
    return value


def _count(path: Path, table: Mapping[str, object], where: str, key: str) -> int:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _COUNT:
        raise _refusal(path, f"{where}.{key} is not a whole number of 1 to {_COUNT}")
    return value


def _chance(path: Path, answer: Mapping[str, object]) -> str:
    """Of AFD; only where both kinds were planned."""
    value = answer.get("probability_afd_better")
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise _refusal(path, "probability_afd_better is not a number of 0 to 1")
    return f"{value:.2f}"


def _refusal(path: Path, why: str) -> ConfigError:
    return ConfigError(f"--compare {path}: {why}; give an answer of `afserve plan --json`")
