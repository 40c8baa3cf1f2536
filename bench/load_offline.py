"""`python -m bench.load --offline`: the load of `bench.load` through `LLM` instead, without a server in between.

As many prompts at once as there are streams, of token ids that are never alike, each with all the tokens it may get.
"""

import random
import time
from typing import Any

from afserve import LLM, SamplingParams

Row = dict[str, Any]


def offline(
    model: str,
    streams: list[int],
    rounds: int,
    repeats: int,
    input_len: int,
    output_len: int,
    vocabulary: int,
) -> list[Row]:
    """Generated tokens per second of wall time, colocated: for each number of streams the median of some runs."""
    params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
    dice, found = random.Random(1), []
    with LLM(model, colocated=True, draft="off") as llm:

        def run(count: int) -> float:
            """Of one round; nothing of it is in a prefix cache."""
            prompts = [[dice.randrange(10, vocabulary) for _ in range(input_len)] for _ in range(count)]
            began = time.perf_counter()
            done = llm.generate(prompts, params)
            tokens = sum(len(one.token_ids) for one in done)
            if tokens != count * output_len:
                raise RuntimeError(f"{tokens} tokens of {count * output_len}")
            return tokens / (time.perf_counter() - began)

        for count in streams:
            run(count)
            rates = sorted(rounds / sum(1 / run(count) for _ in range(rounds)) for _ in range(repeats))
            found.append(
                {
                    "bench": "serve_offline",
                    "server": "LLM --colocated",
                    "concurrency": count,
                    "input_len": input_len,
                    "output_len": output_len,
                    "tokens_per_s": round(rates[len(rates) // 2], 1),
                    "low": round(rates[0], 1),
                    "high": round(rates[-1], 1),
                    "repeats": repeats,
                }
            )
    return found
