"""Steps of `bench.gpu_first_run`, each a process that prints JSON lines as it finds them.

    python -m bench.gpu_steps about                     the machine, its drivers and libraries
    python -m bench.gpu_steps tokens 1x2                greedy tokens of every prompt, and the best few at each place
    python -m bench.gpu_steps engine 1x2                tokens per second of the bundled model, by batch
    python -m bench.gpu_steps wide deepseek-v3 4        milliseconds of a step with dummy weights of so many layers
    python -m bench.gpu_steps sampler                   milliseconds to choose tokens of 129,280, by rows and settings
    python -m bench.gpu_steps copies                    GB/s of weights to the device

`--device cpu` runs the same without a GPU, smaller, for tests.
"""

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import torch
from torch import Tensor

from afserve import LLM, SamplingParams
from afserve.kernels.devices import cuda
from afserve.kernels.devices.opened import device_of

TEXTS = ("import os\n", "def main():\n    ", "class Node:\n", "# The expert nodes are", "for i in range(")
BATCHES, WIDE_BATCHES, SAMPLED = (1, 8, 32, 64), (1, 16, 128), (1, 64, 256)
NEW_TOKENS, REPEATS, TOP = 64, 3, 5
VOCABULARY = 129_280  # DeepSeek-V3's


def tell(**row: object) -> None:
    print(json.dumps(row), flush=True)


def open_llm(topology: str, device: str) -> LLM:
    """`colocated` or AxF. Two micro-batches between nodes, which is the smallest pipeline."""
    if topology == "colocated":
        return LLM("nano", attention=1, colocated=True, device=device)
    attention, experts = (int(count) for count in topology.split("x"))
    return LLM("nano", attention=attention, experts=experts, micro_batches=2, device=device)


def about(device: str) -> None:
    places = [torch.device("cuda", number) for number in range(cuda.count_gpus())]
    chips = [cuda.chip_of(place) for place in places]
    tell(
        python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda, triton=_triton(),
        compiler=shutil.which("gcc") or shutil.which("cc") or "none",
        gpus=[chip.name for chip in chips], capability=chips[0].capability if chips else [],
        free_gib=round(cuda.memory_of(places[0])[0] / 2**30, 1) if places else 0.0,
    )  # fmt: skip
    if (tool := shutil.which("nvidia-smi")) is not None:
        for arguments in (("topo", "-m"), ()):
            done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=30, check=False)
            tell(command=f"nvidia-smi {' '.join(arguments)}".strip(), lines=done.stdout.splitlines())


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def tokens(topology: str, device: str) -> None:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=TOP)
    with open_llm(topology, device) as llm:
        made = llm.generate(list(TEXTS), params)
    top = [[[[i, round(p, 4)] for i, p in entry.top] for entry in out.logprobs] for out in made]
    tell(topology=topology, tokens=[list(out.token_ids) for out in made], top=top)


def engine(topology: str, device: str) -> None:
    new = NEW_TOKENS if device != "cpu" else 8
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    with open_llm(topology, device) as llm:
        for batch in BATCHES if device != "cpu" else BATCHES[:1]:
            texts = [TEXTS[i % len(TEXTS)] + f" {i}" for i in range(batch)]
            found = _rates(llm, texts, params, batch * new)
            transport = llm.topology.deployment.transport
            tell(engine=topology, batch=batch, tokens_per_second=statistics.median(found), low=min(found),
                 high=max(found), transport=transport)  # fmt: skip


def wide(model: str, cut: str, device: str) -> None:
    """Colocated: what a layer's launches cost at real widths, without an exchange."""
    layers, begin = int(cut), time.perf_counter()
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(model, attention=1, colocated=True, device=device, load_format="dummy", layers=layers) as llm:
        tell(model=model, layers=layers, seconds_to_ready=round(time.perf_counter() - begin, 1))
        for batch in WIDE_BATCHES:
            prompts = [[100 + i, 200 + i, 300 + i] for i in range(batch)]
            found = _rates(llm, prompts, params, batch * NEW_TOKENS)
            step = 1e3 * batch / statistics.median(found)
            tell(model=model, layers=layers, batch=batch, step_ms=step, layer_ms=step / layers)


def _rates(llm: LLM, prompts: list[str] | list[list[int]], params: SamplingParams, made: int) -> list[float]:
    """Tokens per second of repeated calls, the first of which is not counted."""
    llm.generate(prompts, params)
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        llm.generate(prompts, params)
        found.append(made / (time.perf_counter() - begin))
    return found


def sampler(device: str) -> None:
    """Greedy, temperature alone, and temperature with top-k and top-p."""
    from bench.gpu_sampler import settings, step_of

    logits_RV = torch.randn(max(SAMPLED), VOCABULARY, device=device)
    for rows, (name, params) in product(SAMPLED if device != "cpu" else SAMPLED[:1], settings().items()):
        call = step_of(logits_RV[:rows], params)
        call()
        tell(sampler=name, rows=rows, ms=1e3 * statistics.median(_seconds(call) for _ in range(REPEATS)))


def copies(device: str) -> None:
    """Host to device, as loading weights does it: plain and pinned memory, one thread and four."""
    size = (256 if device != "cpu" else 8) << 20
    for pinned, threads in product((False, True) if device != "cpu" else (False,), (1, 4)):
        parts = [torch.empty(size // threads, dtype=torch.uint8, pin_memory=pinned) for _ in range(threads)]
        targets = [torch.empty_like(part, device=device) for part in parts]
        with ThreadPoolExecutor(threads) as pool:
            call = partial(_copy, pool, targets, parts, device)
            call()
            seconds = statistics.median(_seconds(call) for _ in range(REPEATS))
        tell(copies="pinned" if pinned else "plain", threads=threads, gb_s=size / seconds / 1e9)


def _copy(pool: ThreadPoolExecutor, targets: list[Tensor], parts: list[Tensor], device: str) -> None:
    list(pool.map(Tensor.copy_, targets, parts))
    device_of(torch.device(device)).finish()


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


STEPS: dict[str, Callable[..., None]] = {
    "about": about, "tokens": tokens, "engine": engine, "wide": wide, "sampler": sampler, "copies": copies,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_steps", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("step", choices=tuple(STEPS))
    parser.add_argument("of", nargs="*", help="a topology; a model and its layers")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    STEPS[options.step](*options.of, options.device)


if __name__ == "__main__":
    main()
