"""Measures transformers' `generate` on the same checkpoint and prompts, in a process of its own.

Started as a module with one JSON argument; prints one JSON row per batch size. Not imported by anything else.
"""

import json
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
import transformers

from afserve.cli.bench.case import Case, prompts
from afserve.cli.bench.figures import Timeline, figures
from afserve.cli.bench.ours import peak_mib
from afserve.cli.bench.report import BenchRow


class TokenClock(transformers.LogitsProcessor):  # type: ignore[misc]
    """Called once per generated token, after its logits: the time a token exists."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def batch(model: Any, ids: torch.Tensor, output_len: int) -> list[Timeline]:
    clock, begin = TokenClock(), time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=output_len,
        min_new_tokens=output_len,
        logits_processor=[clock],
    )
    return [Timeline(begin, tuple(clock.times))] * ids.shape[0]


def main(case: Case) -> None:
    torch.set_num_threads(case.threads or torch.get_num_threads())
    begin = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(case.model, dtype="auto").eval()
    ready = time.perf_counter() - begin
    vocabulary = model.config.vocab_size
    with torch.inference_mode():
        batch(model, torch.tensor(prompts(vocabulary, 2, case.prompt_len, -1)), 4)
        for size in case.batches:
            runs = []
            for seed in range(case.repeats):
                ids = torch.tensor(prompts(vocabulary, size, case.prompt_len, seed))
                runs.append(figures(batch(model, ids, case.output_len)))
            row = BenchRow.of_runs(
                size,
                runs,
                engine=f"transformers {transformers.__version__}",
                start_to_ready=ready,
                peak_mib={"process": peak_mib()},
                threads=torch.get_num_threads(),
            )
            print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    fields = json.loads(sys.argv[1])
    main(Case(**{**fields, "batches": tuple(fields["batches"])}))
