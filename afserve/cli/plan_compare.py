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


def compared(first: Path, second: Path) -> str:
    """A table of the best plans of both files, and both verdicts. Raises ConfigError naming the file."""
    left, right = _best(first), _best(second)
    rows: list[tuple[str, ...]] = [
        ("", first.name, second.name, "change"),
        ("plan", _words(left), _words(right), ""),
    ]
    for label, key in _NUMBERS:
        before, after = _number(first, left, key), _number(second, right, key)
        rows.append((label, f"{before:,.3f}", f"{after:,.3f}", f"{after / before - 1:+.1%}"))
    chances = [
        read_object(path, refusal=ConfigError).get("probability_afd_better") for path in (first, second)
    ]
    rows.append(("AFD is better with", *(_chance(value) for value in chances), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _best(path: Path) -> Mapping[str, object]:
    best = read_object(path, refusal=ConfigError).get("best")
    if not isinstance(best, Mapping):
        raise ConfigError(
            f"--compare {path}: no answer of `afserve plan --json`: it has no best plan", param="compare"
        )
    return best


def _number(path: Path, best: Mapping[str, object], key: str) -> float:
    value = best.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
        raise ConfigError(f"--compare {path}: best.{key} is not a number above 0", param="compare")
    return float(value)


def _words(best: Mapping[str, object]) -> str:
    sides = [best.get("attention"), best.get("experts")]
    named = [f"{side.get('devices')} {side.get('hardware')}" for side in sides if isinstance(side, Mapping)]
    shown = " + ".join(named if best.get("kind") == "afd" else named[:1])
    return f"{best.get('kind')} {shown}, batch {best.get('batch')}, {best.get('engine', '')}"


def _chance(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "-"
