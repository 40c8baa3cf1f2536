"""transformers' `generate` for `bench.decode` and `bench.peers`, with the time of each of its tokens."""

import time
from typing import Any

import torch
import transformers

from afserve.cli.bench.case import Case, prompts
from afserve.cli.bench.figures import Timeline, figures
from afserve.launch.plan.models import CONFIGS
from bench.decode_rows import BenchRow, peak_mib


class TokenClock(transformers.LogitsProcessor):
    """Called once per generated token, after its logits: the time a token exists."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def generate(model: Any, ids: torch.Tensor, output_len: int) -> list[Timeline]:
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


def measured_alone(case: Case) -> list[BenchRow]:
    """On the same checkpoint and prompts as afserve, in a process that does nothing else."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(case.threads or torch.get_num_threads())
    folder = CONFIGS / case.model if (CONFIGS / case.model).is_dir() else case.model
    begin = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ready = time.perf_counter() - begin
    vocabulary, found = model.config.vocab_size, []
    with torch.inference_mode():
        generate(model, torch.tensor(prompts(vocabulary, 2, case.prompt_len, -1)), 4)
        for size in case.batches:
            runs = []
            for seed in range(case.repeats):
                ids = torch.tensor(prompts(vocabulary, size, case.prompt_len, seed))
                runs.append(figures(generate(model, ids, case.output_len)))
            row = BenchRow.of_runs(
                size,
                runs,
                engine=f"transformers {transformers.__version__}",
                start_to_ready=ready,
                peak_mib={"process": peak_mib()},
                threads=torch.get_num_threads(),
            )
            found.append(row)
    return found
