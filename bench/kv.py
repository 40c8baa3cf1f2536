"""What `--kv-copies` costs decoding: pairs of turns with and without copies of KV blocks at another node.

    python -m bench.kv --copies 10      # ten pairs

How fast blocks move is `bench.kv_transfer`.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from afserve.doors.llm import LLM
from afserve.engine.scheduling.request import SamplingParams
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "kv.jsonl"
PAIRS_PER_START = 4
PROMPTS = [f"def function_{n}(a, b):\n" * 20 for n in range(8)]


def decoding(llm: LLM, turn: str) -> float:
    """Tokens per second of eight long streams. No prefix is known from another `turn`."""
    asked = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    found = llm.generate([f"# {turn}\n{prompt}" for prompt in PROMPTS], asked)
    return sum(len(one.token_ids) for one in found) / (time.perf_counter() - began)


def overhead(pairs: int) -> dict[str, object]:
    """Pairs of turns of two deployments that live at once; both are started anew every few pairs."""
    ratios: list[float] = []
    without: list[float] = []
    while len(ratios) < pairs:
        sizes: dict[str, Any] = {"attention": 2, "experts": 1}
        with LLM("nano", kv_copies=0, **sizes) as plain, LLM("nano", kv_copies=1, **sizes) as copying:
            both = {0: plain, 1: copying}
            for copies, llm in both.items():
                decoding(llm, f"warm {copies}")
            for _ in range(min(PAIRS_PER_START, pairs - len(ratios))):
                pair = len(ratios)
                order = (0, 1) if pair % 2 else (1, 0)
                rate = {copies: decoding(both[copies], f"{pair} {copies}") for copies in order}
                ratios.append(rate[1] / rate[0])
                without.append(rate[0])
                print(f"pair {pair}: {rate[0]:,.0f} tokens/s without, {rate[1]:,.0f} with, {ratios[-1]:.3f}")
    print(f"with copies: {statistics.median(ratios):.3f} of the throughput (median of {pairs} pairs)")
    row = {"what": "copies", "pairs": pairs, "median": statistics.median(ratios)}
    return {**row, "low": min(ratios), "high": max(ratios), "tokens_per_second": statistics.median(without)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--copies", type=int, default=10, metavar="PAIRS")
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append the row to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    row = overhead(options.copies)
    if options.save:
        with Path(options.save).open("a") as file:
            file.write(json.dumps({**row, **origin()}) + "\n")


if __name__ == "__main__":
    main()
