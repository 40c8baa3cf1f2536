"""One attention and one expert node on a host's two cores, with cores lent and without, beside the colocated engine.

    python -m bench.make_checkpoint --out /path/to/110m
    python -m bench.lent_cores --model /path/to/110m [--batch 1,32,64] [--micro-batches 1,2] [--rounds 3]
        [--expert-dtype int8] [--save]

The variants take turns, so that a machine which changes its speed changes it for all. Per layer and in us: `period` is
the time from one layer to the next, `attention` and `expert` what the two stages take on one thread each while the
other side waits (one micro-batch, nothing lent), and `not_computed` what remains of the period. The bound of a host is
both cores busy all the time with these stages, (attention + expert) / 2 a layer; reading the same memory at once, two
cores need not reach it. Medians of rounds; ratios by round.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from afserve.cli.bench.pipeline import setups
from afserve.cli.bench.pipeline_node import Setup
from afserve.cli.bench.pipeline_run import Row, disaggregated, together
from afserve.config import EXPERT_DTYPES
from afserve.engine.build import spec_of
from bench.origin import ROOT, origin

RESULTS = ROOT / "bench" / "results" / "lent_cores.jsonl"
PROMPT, OUTPUT = 64, 64
STAGES = "1 micro-batch, nothing lent"  # the variant whose stage times make the bound


def variants(setup: Setup, micro_batches: Sequence[int]) -> dict[str, Setup]:
    """AFD runs by name; the one that the bound needs is always there."""
    found = {STAGES: replace(setup, micro_batches=1, share_cores=False)}
    for count in micro_batches:
        kind = f"{count} micro-batch{'es' * (count > 1)}"
        found[f"{kind}, nothing lent"] = replace(setup, micro_batches=count, share_cores=False)
        found[f"{kind}, cores lent"] = replace(setup, micro_batches=count, share_cores=True)
    return found


def measured(setup: Setup, micro_batches: Sequence[int], rounds: int) -> Iterator[Row]:
    """The colocated engine, then every variant."""
    layers, batch = spec_of(setup.source).layers, setup.batch
    runs: dict[str, list[Row]] = {}
    for _ in range(rounds):
        runs.setdefault("colocated", []).append(together(setup))
        for name, one in variants(setup, micro_batches).items():
            runs.setdefault(name, []).append(disaggregated(one))

    def period(row: Row) -> float:
        return batch / (float(str(row["tok_s"])) * layers) * 1e6

    def middle(values: Iterator[float]) -> float:
        return round(statistics.median(values), 1)

    stage = {
        key: middle(float(str(row[f"{key}_us"])) for row in runs[STAGES]) for key in ("attention", "expert")
    }
    bound = (stage["attention"] + stage["expert"]) / 2
    for name, rows in runs.items():
        rates = [float(str(row["tok_s"])) for row in rows]
        base = [float(str(row["tok_s"])) for row in runs["colocated"]]
        took = middle(period(row) for row in rows)
        row: Row = {
            "batch": batch,
            "variant": name,
            "tok_s": middle(iter(rates)),
            "low": min(rates),
            "high": max(rates),
            "of_colocated": round(statistics.median(a / b for a, b in zip(rates, base, strict=True)), 3),
            "period_us": took,
            "bound_us": round(bound, 1),
            "of_bound": round(bound / took, 3),
            "rounds": rounds,
        }
        if name == STAGES:
            row |= {f"{key}_us": value for key, value in stage.items()}
            row["not_computed_us"] = round(took - sum(stage.values()), 1)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lent_cores", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a checkpoint folder")
    parser.add_argument("--batch", default="1,32,64", help="sequences, comma-separated")
    parser.add_argument("--micro-batches", default="1,2", help="in flight, comma-separated")
    parser.add_argument("--expert-dtype", default="auto", choices=EXPERT_DTYPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--save", action="store_true", help=f"append to {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    batches, counts = (
        [int(one) for one in text.split(",")] for text in (options.batch, options.micro_batches)
    )
    kept = options.expert_dtype
    known = {"bench": "lent_cores", "model": Path(options.model).name, "experts": kept, **origin()}
    with tempfile.TemporaryDirectory() as scratch:
        for setup in setups(options.model, Path(scratch), 1, 1, batches, PROMPT, OUTPUT, 1):
            for row in measured(replace(setup, expert_dtype=kept), counts, options.rounds):
                line = json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items())
                print(line, flush=True)
                if options.save:
                    with RESULTS.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({**known, **row}) + "\n")


if __name__ == "__main__":
    main()
