"""What handing a prompt over from a prefill to a decode node adds to the time to its first token.

    python -m bench.handover      --tokens 2048 --runs 20 --starts 4 --model nano; --json; --save: keep the row

Both ways have one expert node. One has an attention node that does both, the other a prefill and a decode node. Each
prompt is new to both, and ends with one token. Deployments are started in turns and each has the machine for itself,
since nodes that idle take their part of two cores too. Cores are lent in neither: that is for one attention node and
one expert node only, and would be measured in place of the hand-over.
"""

import argparse
import itertools
import json
import random
import time
from statistics import median
from typing import Any

from afserve import LLM, SamplingParams
from bench.origin import ROOT, origin

IDS = 200  # of tokens that every vocabulary has
FIRST = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Seconds until a request with one token has ended."""
    began = time.perf_counter()
    llm.generate([prompt], FIRST)
    return time.perf_counter() - began


def first_tokens(model: str, prompts: list[list[int]], **nodes: Any) -> list[float]:
    """Of each prompt but two, by a deployment of its own."""
    sizes: dict[str, Any] = {"experts": 1, "micro_batches": 1, "threads": 1, "share_cores": False}
    sizes |= {"kv_tokens": 16 * len(prompts[0])}
    with LLM(model, **nodes, **sizes) as llm:
        return [first_token(llm, prompt) for prompt in prompts][2:]


def measure(model: str, tokens: int, runs: int, starts: int) -> dict[str, object]:
    dice = random.Random(1)
    ways = {"together": {"attention": 1}, "apart": {"prefill": 1, "decode": 1, "straight_tokens": 0}}
    seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
    for start in range(starts):
        prompts = [[dice.randrange(3, IDS) for _ in range(tokens)] for _ in range(runs + 2)]
        for name in sorted(ways, reverse=start % 2 == 1):
            seconds[name].append(first_tokens(model, prompts, **ways[name]))
    everything = [list(itertools.chain.from_iterable(seconds[name])) for name in ways]
    own, handed = map(median, everything)
    shares = [median(a) / median(b) - 1 for a, b in zip(seconds["apart"], seconds["together"], strict=True)]
    return {
        "experiment": "hand-over",
        "model": model,
        "tokens": tokens,
        "runs": runs,
        "starts": starts,
        "ttft_ms": round(1e3 * own, 2),
        "handed_ttft_ms": round(1e3 * handed, 2),
        "adds": round(handed / own - 1, 3),
        "adds_by_start": [round(share, 3) for share in shares],
        "spread_ms": [round(1e3 * (max(s) - min(s)), 2) for s in everything],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=20, help="prompts of each start")
    parser.add_argument("--starts", type=int, default=4, help="of each deployment")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="append to bench/results/phases.jsonl")
    options = parser.parse_args()
    known = origin()
    row = measure(options.model, options.tokens, options.runs, options.starts)
    print(json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    if options.save:
        with (ROOT / "bench" / "results" / "phases.jsonl").open("a") as file:
            file.write(json.dumps({**row, **known}) + "\n")


if __name__ == "__main__":
    main()
