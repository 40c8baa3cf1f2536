"""One engine for `bench.peers`, in a process of its own: afserve's two modes, or transformers.

Started with a name, a model folder, prompt length, output length, threads, what experts and other maps are kept in, and
the instruction set; answers lines of JSON.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from afserve.cli.bench.case import Case
from afserve.cli.bench.figures import Timeline, figures
from afserve.config import AUTO

PROMPTS = 3  # of a length, measured one after another
UNSEEN = 1000  # seeds of prompts that no other measurement has used: their prefixes are in no cache
Run = Callable[[Case, int, int], Sequence[Timeline]]  # (what, sequences, seed)


def main(
    name: str, model: str, prompt: int, output: int, threads: int, kept: str, dense: str, isa: str = AUTO
) -> None:
    case = Case(model, (1,), prompt, output, 1, threads, isa)
    if name == "transformers":
        _transformers(name, case)
    else:
        _afserve(name, case, kept, dense)


def _answer(name: str, case: Case, run: Run) -> None:
    run(case, 2, -1)
    print(json.dumps({"name": name}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "prefill" in asked:
            rate = _prefill_rate(case, run, asked["prefill"], asked["seed"] + UNSEEN)
        else:
            rate = _steady_rate(case, run, asked["batch"], asked["seed"])
        print(json.dumps({"rate": rate}), flush=True)


def _prefill_rate(case: Case, run: Run, prompt: int, seed: int) -> float:
    """Tokens per second of one prompt of so many, the median of several behind one that is not measured."""
    one = replace(case, prompt_len=prompt, output_len=1)
    rates = [prompt / figures(run(one, 1, seed + UNSEEN * i)).ttft for i in range(1 + PROMPTS)]
    return median(rates[1:])


def _steady_rate(case: Case, run: Run, batch: int, seed: int) -> float:
    """Tokens per second. Where first answers end before the last prompts are computed, longer ones are asked for."""
    for times in (1, 2, 4):
        one = replace(case, output_len=times * case.output_len)
        rate = figures(run(one, batch, seed)).tokens_per_second
        if rate is not None:
            return rate
    raise SystemExit(
        f"{batch} sequences never decoded together, with answers of {times * case.output_len} tokens; "
        "give a longer --output-len"
    )


def _afserve(name: str, case: Case, kept: str, dense: str) -> None:
    from afserve.cli.bench.ours import run_batch
    from afserve.doors.llm import LLM

    colocated = name == "colocated"
    threads = case.threads if colocated else max(1, (case.threads or 2) // 2)
    nodes: dict[str, Any] = {"attention": 1, "experts": None if colocated else 1}
    with LLM(
        case.model,
        colocated=colocated,
        threads=threads,
        expert_dtype=kept,
        dense_dtype=dense,
        isa=case.isa,
        draft="off",
        **nodes,
    ) as llm:
        _answer(name, case, lambda asked, batch, seed: run_batch(llm, asked, batch, seed))


def _transformers(name: str, case: Case) -> None:
    import torch
    import transformers

    from afserve.cli.bench.case import prompts
    from afserve.cli.bench.peer import batch as generate

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(case.threads or 1)
    stored = getattr(transformers.AutoConfig.from_pretrained(case.model), "quantization_config", {})
    few = {}
    if stored.get("quant_method") == "mxfp4":  # multiplied as stored on GPUs only
        few["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(case.model, dtype="auto", **few).eval()
    vocabulary = model.config.vocab_size

    def run(asked: Case, batch: int, seed: int) -> Sequence[Timeline]:
        with torch.inference_mode():
            ids = torch.tensor(prompts(vocabulary, batch, asked.prompt_len, seed))
            return generate(model, ids, asked.output_len)

    _answer(f"transformers {transformers.__version__}", case, run)


if __name__ == "__main__":
    prompt, output, threads = map(int, sys.argv[3:6])
    main(sys.argv[1], sys.argv[2], prompt, output, threads, *sys.argv[6:9])
