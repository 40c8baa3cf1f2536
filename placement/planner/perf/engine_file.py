"""An engine's profile from JSON: `configs/engines/*.json`, or a file of the user's. Opens no files.

Measured rows are a table with a header, one list per row, so that a profile can be read and compared.
`bench/planner_engine_file.py` writes them.
"""

import json
from collections.abc import Mapping

import numpy as np

from afserve.errors import ConfigError
from afserve.placement.planner.perf.drafting import DRAFTERS
from afserve.placement.planner.perf.engine import Engine, Rates, Wait
from afserve.placement.planner.perf.engine_rows import OFF, Like, MeasuredRows
from afserve.placement.planner.perf.fields import TableFields

_NAMES = ("model", "chip", "experts", "layout", "prompts")
MODE = "drafts"
"""A last column, of profiles with rows that were measured with drafts."""
_LENGTHS = ("prompt", "answer")
NUMBERS = ("requests", "devices", "tpot", "ttft", "wrong")
COLUMNS = (*_NAMES, *_LENGTHS, *NUMBERS)
KINDS = ("colocated", "afd")
_MOST = 1e4


def engine_from_values(source: str, values: Mapping[str, object]) -> Engine:
    """`source` is shown in errors (the file). Raises ConfigError naming file, key and value."""
    entries = TableFields(source, values)
    if _columns(entries) not in (COLUMNS, (*COLUMNS, MODE)):
        raise ConfigError(
            f"{source}: columns must be {', '.join(COLUMNS)}, and may end with {MODE}", param="engine"
        )
    kinds = tuple(str(kind) for kind in entries.items("kinds"))
    if not kinds or not set(kinds) <= set(KINDS):
        raise entries.refuse("kinds", f"must be a list of {' and '.join(KINDS)}")
    return Engine(
        name=entries.text("name"),
        about=entries.text("about", ""),
        source=entries.text("source", ""),
        kinds=kinds,
        against=entries.text("against", ""),
        steps_ahead=_flag(entries, "steps_ahead"),
        shared_on_experts=_flag(entries, "shared_on_experts"),
        exchange_kernels=_flag(entries, "exchange_kernels"),
        balances_kv=entries.has("balances_kv") and _flag(entries, "balances_kv"),
        broadcasts=entries.has("broadcasts") and _flag(entries, "broadcasts"),
        own=entries.has("own") and _flag(entries, "own"),
        parallel=_counts(entries, "parallel"),
        micro_batches=_counts(entries, "micro_batches"),
        memory=_share(entries, "memory"),
        rates=Rates(**_numbers(entries.section("rates"), tuple(Rates.__slots__))),
        wait=Wait(**_numbers(entries.section("wait"), tuple(Wait.__slots__))),
        factors=_numbers(entries.section("factors"), least=1 / _MOST),
        wait_factors=_numbers(entries.section("wait_factors"), least=1 / _MOST),
        rows=_rows(entries),
        fit=_said(entries.section("fit")),
    )


def _said(entries: TableFields) -> Mapping[str, object]:
    """What is printed again as it is: JSON has no infinity."""
    for key, value in entries.table.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            raise entries.refuse(key, "must be finite") from error
    return entries.table


def _flag(entries: TableFields, key: str) -> bool:
    value = entries.table.get(key)
    if not isinstance(value, bool):
        raise entries.refuse(key, "must be true or false")
    return value


def _share(entries: TableFields, key: str) -> float:
    value = entries.number(key)
    if not 0.1 <= value <= 1:
        raise entries.refuse(key, "must be 0.1 to 1")
    return value


def _counts(entries: TableFields, key: str) -> tuple[int, ...]:
    found = tuple(value for value in entries.items(key) if isinstance(value, int) and 1 <= value <= 64)
    if not found or len(found) != len(entries.items(key)):
        raise entries.refuse(key, "must be a list of whole numbers from 1 to 64")
    return found


def _numbers(entries: TableFields, names: tuple[str, ...] = (), least: float = 0) -> dict[str, float]:
    """Of a section of numbers: exactly `names` where they are given."""
    found = {name: entries.number(name, least=least) for name in names or entries.table}
    wrong = next((name for name, value in found.items() if value > _MOST), None)
    if wrong is not None:
        raise entries.refuse(wrong, f"must be at most {_MOST:g}")
    return found


def _mode(row: TableFields) -> str:
    mode = row.text(MODE, OFF)
    if mode != OFF and mode not in DRAFTERS:
        raise row.refuse(MODE, f"must be {OFF} or one of {', '.join(DRAFTERS)}")
    return mode


def _columns(entries: TableFields) -> tuple[str, ...]:
    return tuple(str(name) for name in entries.items("columns"))


def _rows(entries: TableFields) -> MeasuredRows:
    likes, numbers, columns = [], [], _columns(entries)
    for place, row in enumerate(entries.items("rows")):
        where = f"{entries.source}: row {place + 1}"
        if not isinstance(row, list) or len(row) != len(columns):
            raise ConfigError(f"{where} must be a list of {len(columns)} values", param="engine")
        one = TableFields(where, dict(zip(columns, row, strict=True)))
        names = {name: one.text(name) for name in _NAMES}
        prompt, answer = (one.number(name, least=1) for name in _LENGTHS)
        likes.append(Like(**names, prompt=prompt, answer=answer, drafts=_mode(one)))
        numbers.append([one.number(name, least=-_MOST) for name in NUMBERS])
    if not likes:
        return MeasuredRows()
    requests, devices, tpot, ttft, wrong = np.array(numbers).T
    quantile = entries.number("quantile", least=1e-3)
    many = entries.number("quantile_many", quantile, least=1e-3)
    return MeasuredRows(tuple(likes), requests, devices, tpot, ttft, wrong, quantile, many)
