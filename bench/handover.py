"""What handing a prompt over from a prefill to a decode node adds to the time to its first token: two runs, in turns.

    python -m bench.handover                 --tokens 2048 --runs 20 --model nano; --json; --save: keep the row

Both runs have one expert node. One has an attention node that does both, the other a prefill and a decode node. Each
prompt is new to both, and ends with one token.
"""

import argparse
import json
import random
import time
from statistics import median

from afserve import LLM, SamplingParams
from bench.origin import ROOT, origin

IDS = 200  # of tokens that every vocabulary has
FIRST = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Seconds until a request with one token has ended."""
    began = time.perf_counter()
    llm.generate([prompt], FIRST)
    return time.perf_counter() - began


def measure(model: str, tokens: int, runs: int) -> dict[str, object]:
    dice = random.Random(1)
    sizes = {"experts": 1, "micro_batches": 1, "threads": 1, "kv_tokens": 16 * tokens}
    with (
        LLM(model, attention=1, **sizes) as together,
        LLM(model, prefill=1, decode=1, straight_tokens=0, **sizes) as apart,
    ):
        seconds: dict[str, list[float]] = {"together": [], "apart": []}
        for number in range(runs + 2):
            prompt = [dice.randrange(3, IDS) for _ in range(tokens)]
            for name, llm in (("together", together), ("apart", apart)):
                took = first_token(llm, prompt)
                if number >= 2:
                    seconds[name].append(took)
    own, handed = median(seconds["together"]), median(seconds["apart"])
    return {
        "experiment": "hand-over",
        "model": model,
        "tokens": tokens,
        "runs": runs,
        "ttft_ms": round(1e3 * own, 2),
        "handed_ttft_ms": round(1e3 * handed, 2),
        "adds": round(handed / own - 1, 3),
        "spread_ms": [round(1e3 * (max(s) - min(s)), 2) for s in seconds.values()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="append to bench/results/phases.jsonl")
    options = parser.parse_args()
    known = origin()
    row = measure(options.model, options.tokens, options.runs)
    print(json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    if options.save:
        with (ROOT / "bench" / "results" / "phases.jsonl").open("a") as file:
            file.write(json.dumps({**row, **known}) + "\n")


if __name__ == "__main__":
    main()
