"""What a layer takes beside reading its weights: one sequence, colocated, one thread and two.

    python -m bench.layer_time [--shapes thin-187m,small-experts-178m] [--kept auto,int4] [--isa avx2] [--save]

Each shape is made with few layers and with more, all in the caches, so that the difference is layers and nothing else.
One thread takes `c + w` for a layer and two take `c + w / 2`: w is shared out (reading and multiplying weights), and c
is not (what one thread does alone, and the rounds of threads). So c = 2 * two - one: of 50 us with one thread and 31
with two, 12 are beside reading. The four engines decode in turns; of each the best step counts, which no other guest of
the machine has cut short, and beside it the median is kept.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from afserve.cli.bench.case import prompts
from afserve.config import AUTO, ISAS, EngineConfig, ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from bench.make_checkpoint import SHAPES, write
from bench.origin import ROOT, origin

RESULTS = ROOT / "bench" / "results" / "layer_time.jsonl"
LAYERS = (1, 4)
THREADS = (1, 2)
PROMPT, OUTPUT = 64, 128
SKIPPED = 4  # steps of an answer that are not counted: the prompt, and those that find their pace
Engines = dict[tuple[int, int], Any]  # by layers and threads


def engines(shape: str, kept: str, isa: str, scratch: Path) -> Engines:
    made: Engines = {}
    for layers in LAYERS:
        folder = scratch / f"{shape}-{layers}"
        if not folder.exists():
            folder.mkdir()
            whole = SHAPES[shape]
            write(replace(whole, config={**whole.config, "num_hidden_layers": layers}), folder)
        for threads in THREADS:
            config = EngineConfig(
                PROMPT + OUTPUT + 2, 32, threads=threads, expert_dtype=kept, dense_dtype=kept, isa=isa
            )
            made[layers, threads] = colocated(
                ModelSource(str(folder), shape), replace(config, prefix_caching=False)
            )
    return made


def steps(node: Any, number: int) -> list[float]:
    """Seconds of a token in each step of one answer."""
    vocabulary = SHAPES["thin-187m"].config["vocab_size"]
    (ids,) = prompts(vocabulary, 1, PROMPT, 0)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    node.submit(GenerationRequest(number, tuple(ids), params))
    took: list[float] = []
    while node.busy:
        began = time.perf_counter()
        tokens = sum(len(event.token_ids) for event in node.step())
        if tokens:
            took.append((time.perf_counter() - began) / tokens)
    return took[SKIPPED:]


def measured(shape: str, kept: str, isa: str, rounds: int, scratch: Path) -> dict[str, object]:
    made = engines(shape, kept, isa, scratch)
    found: dict[tuple[int, int], list[float]] = {case: [] for case in made}
    for number in range(rounds):
        for case, node in made.items():
            found[case] += steps(node, number)
    few, more = LAYERS

    def layer(threads: int, of: Any) -> float:
        return float((of(found[more, threads]) - of(found[few, threads])) / (more - few) * 1e6)

    def beside(of: Any) -> tuple[float, float, float]:
        one, two = (layer(threads, of) for threads in THREADS)
        return round(one, 1), round(two, 1), round(2 * two - one, 1)

    names = ("one_thread_us", "two_threads_us", "beside_us")
    return {
        "bench": "layer_time",
        "shape": shape,
        "kept": kept,
        "rounds": rounds,
        "steps": len(found[few, 1]),
        **dict(zip(names, beside(min), strict=True)),
        **{f"median_{name}": value for name, value in zip(names, beside(median), strict=True)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", default="thin-187m,small-experts-178m")
    parser.add_argument(
        "--kept", default="auto,int4", help="weights of experts and of other maps; auto: bf16"
    )
    parser.add_argument("--isa", choices=[AUTO, *ISAS], default=AUTO)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--save", action="store_true", help=f"append the rows to {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    for row in rows(options):
        print(json.dumps(row), flush=True)
        if options.save:
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def rows(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    with TemporaryDirectory() as scratch:
        for shape in options.shapes.split(","):
            for kept in options.kept.split(","):
                found = measured(shape, kept, options.isa, options.rounds, Path(scratch))
                yield {**found, **origin(options.isa)}


if __name__ == "__main__":
    main()
