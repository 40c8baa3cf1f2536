"""Stages of `bench.gpu_first_run`, each a process: tokens, or tokens per second, of one topology on one device.

    python -m bench.gpu_stages tokens 1x2     one JSON line: the tokens of every prompt
    python -m bench.gpu_stages engine 1x2     one JSON line per batch size

`--device cpu` runs the same without a GPU, for tests.
"""

import argparse
import json
import statistics
import sys
import time

from afserve import LLM, SamplingParams

TEXTS = ("import os\n", "def main():\n    ", "class Node:\n", "# The expert nodes are", "for i in range(")
BATCHES = (1, 8, 32, 64)
NEW_TOKENS, REPEATS = 64, 3


def open_llm(topology: str, device: str) -> LLM:
    """`colocated` or AxF. One micro-batch: the smallest thing that can be wrong."""
    if topology == "colocated":
        return LLM("nano", attention=1, colocated=True, device=device)
    attention, experts = (int(count) for count in topology.split("x"))
    return LLM("nano", attention=attention, experts=experts, micro_batches=2, device=device)


def tokens(topology: str, device: str) -> None:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    with open_llm(topology, device) as llm:
        print(json.dumps([list(out.token_ids) for out in llm.generate(list(TEXTS), params)]))


def engine(topology: str, device: str) -> None:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    with open_llm(topology, device) as llm:
        for batch in BATCHES:
            texts = [TEXTS[i % len(TEXTS)] + f" {i}" for i in range(batch)]
            llm.generate(texts, params)
            rates = []
            for _ in range(REPEATS):
                begin = time.perf_counter()
                made = sum(len(out.token_ids) for out in llm.generate(texts, params))
                rates.append(made / (time.perf_counter() - begin))
            row = {
                "engine": topology,
                "batch": batch,
                "tokens_per_second": statistics.median(rates),
                "low": min(rates),
                "high": max(rates),
                "transport": llm.topology.deployment.transport,
            }
            print(json.dumps(row), flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_stages", description=__doc__)
    parser.add_argument("stage", choices=("tokens", "engine"))
    parser.add_argument("topology")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    {"tokens": tokens, "engine": engine}[options.stage](options.topology, options.device)


if __name__ == "__main__":
    sys.exit(main())
