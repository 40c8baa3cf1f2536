"""vLLM for `bench.peers`, run by vLLM's own Python: it imports nothing of this project.

Arguments: model folder, prompt length, output length, threads, the longest prompt that is prefilled alone.
The steady rate is that of all tokens but the first of each sequence: a run of the full length less a run of one token.
"""

import json
import random
import sys
import time
from statistics import median

PROMPTS = 3  # of a length, measured one after another, behind one that is not


def main(model: str, prompt: int, output: int, threads: int, longest: int) -> None:
    import torch
    import vllm

    torch.set_num_threads(threads)
    llm = vllm.LLM(
        model, dtype="bfloat16", max_num_seqs=64, max_model_len=max(prompt + output, longest) + 16,
        enable_prefix_caching=False, disable_log_stats=True, gpu_memory_utilization=0.3,
    )  # fmt: skip
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def seconds(batch: int, seed: int, tokens: int, prompt: int = prompt) -> float:
        source = random.Random(f"{seed}/{batch}/{prompt}")
        ids = [
            {"prompt_token_ids": [source.randrange(16, vocabulary) for _ in range(prompt)]}
            for _ in range(batch)
        ]
        params = vllm.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate(ids, params, use_tqdm=False)
        return time.perf_counter() - begin

    def rate(batch: int, seed: int) -> float:
        return batch * (output - 1) / (seconds(batch, seed, output) - seconds(batch, seed + 1000, 1))

    rate(2, -1)
    print(json.dumps({"name": f"vllm {vllm.__version__}"}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "prefill" in asked:
            seeds = [asked["seed"] + 2000 * i for i in range(1 + PROMPTS)]
            found = asked["prefill"] / median([seconds(1, seed, 1, asked["prefill"]) for seed in seeds][1:])
        else:
            found = rate(asked["batch"], asked["seed"])
        print(json.dumps({"rate": found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(value) for value in sys.argv[2:6]))
