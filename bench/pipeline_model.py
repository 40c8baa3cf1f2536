"""Ping-pong on a real model, as `afserve bench pipeline` measures it, into bench/results/pipeline.jsonl.

python -m bench.make_checkpoint --out /path/to/110m
python -m bench.pipeline_model --model /path/to/110m [--batch 8,32,64] [--json] [--save]
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from afserve.cli.bench.pipeline import rows, setups
from bench.origin import ROOT, origin

PROMPT, OUTPUT = 64, 64


def measured(model: str, batches: list[int], micro_batches: list[int]) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as scratch:
        for setup in setups(model, Path(scratch), 1, 1, batches, PROMPT, OUTPUT, 1):
            for row in rows(setup, micro_batches):
                yield {"experiment": "real model", "model": setup.source.name, **row}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pipeline_model", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", required=True, help="a checkpoint folder")
    parser.add_argument("--batch", default="8,32,64", help="sequences, comma-separated")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--save", action="store_true", help="append to bench/results/pipeline.jsonl")
    options = parser.parse_args()
    known = origin()
    for row in measured(options.model, [int(batch) for batch in options.batch.split(",")], [1, 2, 3]):
        print(
            json.dumps(row) if options.json else "  ".join(f"{key} {value}" for key, value in row.items()),
            flush=True,
        )
        if options.save:
            with (ROOT / "bench" / "results" / "pipeline.jsonl").open("a") as file:
                file.write(json.dumps({**row, **known}) + "\n")


if __name__ == "__main__":
    main()
