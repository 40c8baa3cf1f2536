"""Fit the engine profiles of `configs/engines` to public rows, and write them.

    python -m bench.planner_engines [--data ../shared/data/planner] [--unseen 0] [--out configs/engines]

Rows of served engines are split by series into five folds; fold `--unseen` is never read by the fit, and is what
`python -m bench.planner` judges. Rows whose mode is not said (`planner_rows.unsaid`) are fitted to nothing; that the
engine was measured so far from what is planned makes intervals near them wider. Rows of other sources than the public
table move no rate: they correct plans that are like them. vLLM's sixteen rows of wide expert
parallelism on GB200 are all fitted; their error is of workloads left out in turn. Systems with a handful of published
rows keep the kernels' rates and learn only how far those rows are off; their error is of series that were left out in
turn.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from afserve.cli.plan.catalog import load_curves
from afserve.placement.planner.perf.engine import PLAIN, Engine
from bench.planner_engine_file import engine_values
from bench.planner_engine_fit import Evidence, beside, evidence, fit_engine
from bench.planner_more_rows import ELSEWHERE, SOURCES, more_rows
from bench.planner_public import deepseek_rows, fastafd_rows, step3_rows, wide_rows
from bench.planner_rows import fold, impossible, read_rows, unsaid
from bench.planner_served import ServedRow

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared/data/planner"
FOLDS = 5
UNSAID = "rows_of_unsaid_modes"
WIDE = "vllm wide"  # how the series of wide expert parallelism begin
# Shares of memory: the largest batches that were published take 0.875 to 0.89 of vLLM's devices (twelve rows), 0.78 to
# 0.815 of FastAFD's (four).
SERVED = {
    "vllm": Engine(
        "vllm",
        "vLLM 0.10 to 0.19 as served, and its wide expert parallelism on GB200",
        ("colocated",),
        "fastafd",
        micro_batches=(1,),
        memory=0.88,
    ),
    "sglang": Engine("sglang", "SGLang as served", ("colocated",), "fastafd", micro_batches=(1,)),
    "tensorrt-llm": Engine(
        "tensorrt-llm", "TensorRT-LLM as served", ("colocated",), "fastafd", micro_batches=(1,)
    ),
}
BACKENDS = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm"}
SILICON = "ai-dynamo/aiconfigurator, measured configurations"
SYSTEMS = {
    "fastafd": Engine(
        "fastafd",
        "FastAFD on GB200 NVL72: device time, the next step is prepared behind this one",
        ("afd",),
        "vllm",
        steps_ahead=True,
        parallel=(1,),
        micro_batches=(2,),
        memory=0.815,
        source="FastAFD, public repository",
    ),
    "step-3": Engine(
        "step-3",
        "Step-3 on H800 with StepMesh: transfers take no device time, every row goes to every expert device, shared "
        "experts stand on the expert side",
        ("afd",),
        "deepseek",
        shared_on_experts=True,
        broadcasts=True,
        exchange_kernels=False,
        parallel=(1,),
        micro_batches=(3,),
        source="arXiv 2507.19427; StepMesh, public repository, its introduction",
    ),
    "deepseek": Engine(
        "deepseek",
        "DeepSeek's own system on H800: wide expert parallelism, two micro-batches, cached tokens evened out over "
        "ranks",
        ("colocated",),
        "step-3",
        balances_kv=True,
        parallel=(1,),
        micro_batches=(2,),
        source="DeepSeek open infra, day 6, and its profile data, whose routing is even",
    ),
}
MEGASCALE = Engine(
    "megascale",
    "MegaScale-Infer: no absolute figures are published; kernels as they are",
    ("afd",),
    "vllm",
    micro_batches=(3, 4),
    source="arXiv 2504.02263",
)


def rows_of(data: Path) -> dict[str, list[ServedRow]]:
    """Rows by engine: aggregated and disaggregated ones of the public table, and what systems published."""
    read = read_rows(data / "silicon_rows.csv")[0]
    table = [row for row in read if not impossible(row)] + more_rows(data / "new_rows.csv")
    found = {
        name: [row for row in table if row.engine.split()[0] == backend] for name, backend in BACKENDS.items()
    }
    return found | {"fastafd": fastafd_rows(), "step-3": step3_rows(), "deepseek": deepseek_rows()}


def evidence_of(name: str, rows: list[ServedRow]) -> Evidence:
    """All rows of an engine, evaluated part by part; those of wide expert parallelism with vLLM's."""
    extra = wide_rows() if name == "vllm" else []
    return evidence(rows + extra, load_curves("h200"), SYSTEMS.get(name, SERVED.get(name, PLAIN)))


def fitted(name: str, found: Evidence, unseen: int) -> Engine:
    if name in SYSTEMS:
        return fit_engine(SYSTEMS[name], found, rates=False)
    engine = SERVED[name]
    kept = np.array([row.series.startswith(WIDE) or fold(row, FOLDS) != unseen for row in found.rows])
    odd = np.array([unsaid(row) for row in found.rows])
    seen = found.some(kept & ~odd)
    source = f"{SILICON}; {SOURCES}; folds by series, fold {unseen} of {FOLDS} unseen"
    core = np.array([not row.series.startswith(ELSEWHERE) for row in seen.rows])
    engine = beside(fit_engine(engine, seen, core=core), found.some(kept & odd))
    engine = replace(engine, fit={**engine.fit, UNSAID: int((kept & odd).sum())})
    return _named(engine, source, int((~kept).sum()), seen.rows)


def _named(engine: Engine, source: str, unseen: int, seen: tuple[ServedRow, ...]) -> Engine:
    releases = sorted({row.release for row in seen if row.release})
    fit = dict(engine.fit) | {"unseen_rows": unseen, "releases": releases}
    values = {name: getattr(engine, name) for name in Engine.__slots__} | {"source": source, "fit": fit}
    return Engine(**values)


def write(engine: Engine, folder: Path) -> None:
    """One measured row a line, so that a change of the fit can be read as a difference."""
    values = engine_values(engine)
    rows = values.pop("rows")
    assert isinstance(rows, list)
    text = json.dumps(values, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    (folder / f"{engine.name}.json").write_text(f'{text},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument(
        "--unseen", type=int, default=0, choices=range(FOLDS), help="the fold that is not fitted"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "configs/engines")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in rows_of(options.data).items():
        engine = fitted(name, evidence_of(name, rows), options.unseen)
        write(engine, options.out)
        print(
            name,
            json.dumps(dict(engine.fit)),
            f"80 % quantile {np.round(engine.rows.quantile, 3)}",
            flush=True,
        )
    for plain in (PLAIN, MEGASCALE):
        write(plain, options.out)


if __name__ == "__main__":
    main()
