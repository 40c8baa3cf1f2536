"""Writes an engine's profile as the JSON that `placement/planner/perf/engine_file.py` reads. Opens no files."""

from afserve.placement.planner.perf.engine import Engine, Rates, Wait
from afserve.placement.planner.perf.engine_file import COLUMNS, MODE, NUMBERS
from afserve.placement.planner.perf.engine_rows import MeasuredRows


def engine_values(engine: Engine) -> dict[str, object]:
    """The JSON object of a profile. requests and devices are in doublings; tpot and ttft are weights of corrections,
    wrong is the log error that a fit without the row's series leaves."""
    return {
        "name": engine.name,
        "about": engine.about,
        "source": engine.source,
        "kinds": list(engine.kinds),
        "against": engine.against,
        "steps_ahead": engine.steps_ahead,
        "shared_on_experts": engine.shared_on_experts,
        "exchange_kernels": engine.exchange_kernels,
        "balances_kv": engine.balances_kv,
        "broadcasts": engine.broadcasts,
        "own": engine.own,
        "parallel": list(engine.parallel),
        "micro_batches": list(engine.micro_batches),
        "memory": engine.memory,
        "fit": dict(engine.fit),
        "rates": {name: getattr(engine.rates, name) for name in Rates.__slots__},
        "wait": {name: getattr(engine.wait, name) for name in Wait.__slots__},
        "factors": dict(engine.factors),
        "wait_factors": dict(engine.wait_factors),
        "quantile": round(engine.rows.quantile, 4),
        "quantile_many": round(engine.rows.quantile_many, 4),
        "columns": [*COLUMNS, MODE] if engine.rows.drafted else list(COLUMNS),
        "rows": _table(engine.rows),
    }


def _table(rows: MeasuredRows) -> list[list[object]]:
    table: list[list[object]] = []
    for place, like in enumerate(rows.like):
        names = [getattr(like, name) for name in COLUMNS[: -len(NUMBERS)]]
        numbers = [round(float(getattr(rows, name)[place]), 4) for name in NUMBERS]
        table.append([*names, *numbers, *([like.drafts] if rows.drafted else [])])
    return table
