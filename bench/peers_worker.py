"""One engine for `bench.peers`, in a process of its own: afserve's two modes, or transformers.

Started with a name, a model folder, prompt length, output length, threads and what experts are kept in; answers lines
of JSON.
"""

import json
import sys
from collections.abc import Callable

from afserve.cli.bench.case import Case
from afserve.cli.bench.figures import figures

Rate = Callable[[int, int], float]


def main(name: str, model: str, prompt: int, output: int, threads: int, kept: str) -> None:
    case = Case(model, (1,), prompt, output, 1, threads)
    if name == "transformers":
        _transformers(name, case)
    else:
        _afserve(name, case, kept)


def _answer(name: str, rate: Rate) -> None:
    rate(2, -1)
    print(json.dumps({"name": name}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"rate": rate(asked["batch"], asked["seed"])}), flush=True)


def _afserve(name: str, case: Case, kept: str) -> None:
    from afserve.cli.bench.ours import _batch
    from afserve.llm import LLM

    colocated = name == "colocated"
    threads = case.threads if colocated else max(1, (case.threads or 2) // 2)
    nodes = {"attention": 1, "experts": None if colocated else 1}
    with LLM(case.model, colocated=colocated, threads=threads, expert_dtype=kept, **nodes) as llm:
        _answer(name, lambda batch, seed: figures(_batch(llm, case, batch, seed)).tokens_per_second or 0.0)


def _transformers(name: str, case: Case) -> None:
    import torch
    import transformers

    from afserve.cli.bench.case import prompts
    from afserve.cli.bench.peer import batch as generate

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(case.threads or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(case.model, dtype="auto").eval()
    vocabulary = model.config.vocab_size

    def rate(batch: int, seed: int) -> float:
        with torch.inference_mode():
            ids = torch.tensor(prompts(vocabulary, batch, case.prompt_len, seed))
            return figures(generate(model, ids, case.output_len)).tokens_per_second or 0.0

    _answer(f"transformers {transformers.__version__}", rate)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(value) for value in sys.argv[3:6]), sys.argv[6])
