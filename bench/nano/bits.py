"""`python -m bench.nano.bits`: what few bits cost nano, as the engine serves it: bits per byte of held-out text.

The text is the committed sample, the windows are those of `heldout`, the numbers are the engine's own logprobs in
bfloat16. With --save they go to training.json and onto the card. Knows no training.
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from afserve.config import EXPERT_DTYPES, EngineConfig, ModelSource
from afserve.engine.build import build_expert_bank, colocated, spec_of
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from bench.nano import card
from bench.nano.heldout import CONTEXT, Scored, windows

HOME = Path(__file__).parents[2] / "configs" / "nano"
# Name -> what experts and what other linear maps are kept in.
KEPT = {
    "bf16": ("auto", "auto"),
    **{kept: (kept, "auto") for kept in EXPERT_DTYPES if kept != "auto"},
    **{f"{kept} everywhere": (kept, kept) for kept in EXPERT_DTYPES if kept != "auto"},
}
ASKED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Cost:
    """`perplexity` is by token; `weight_error` of experts is relative, 0 where nothing is rounded."""

    bits_per_byte: float
    perplexity: float
    weight_error: float
    windows: int


def texts(folder: Path) -> list[str]:
    return list(json.loads((folder / "heldout.json").read_text()).values())


def costs(folder: Path, most: int | None = None, threads: int = 1) -> dict[str, dict[str, float]]:
    """By what experts, and with "everywhere" the other linear maps too, are kept in; printed as they come."""
    found = {}
    for name, (kept, dense) in KEPT.items():
        cost = measured(folder, kept, dense, texts(folder), most, threads)
        found[name] = {key: round(value, 5) for key, value in asdict(cost).items()}
        print(json.dumps({"bench": "nano bits", "kept": name, **found[name]}), flush=True)
    return found


def measured(folder: Path, kept: str, dense: str, some: list[str], most: int | None, threads: int) -> Cost:
    """Windows of whole texts, at most `most` of them; bytes are those of the tokens that count."""
    bpe = Tokenizer.from_file(str(folder / "tokenizer.json"))
    scored = [w for text in some for w in windows(bpe.encode(text, add_special_tokens=False).ids)][:most]
    nats = _nats(folder, kept, dense, scored, threads)
    tokens = [w.ids[w.first + 1 :] for w in scored]
    size = sum(len(bpe.decode(ids, skip_special_tokens=False).encode()) for ids in tokens)
    count = sum(map(len, tokens))
    error = _weight_error(folder, kept)
    return Cost(nats / math.log(2) / size, math.exp(nats / count), error, len(scored))


def _nats(folder: Path, kept: str, dense: str, scored: list[Scored], threads: int) -> float:
    """Negative logprobs of the tokens that count, summed."""
    room = CONTEXT + 32
    config = EngineConfig(
        room,
        8 * room // 16,
        max_batch_tokens=512,
        prefix_caching=False,
        threads=threads,
        expert_dtype=kept,
        dense_dtype=dense,
    )
    node = colocated(ModelSource(str(folder), "nano"), config)
    for number, window in enumerate(scored):
        node.submit(GenerationRequest(number, tuple(window.ids), ASKED))
    nats = 0.0
    while node.busy:
        for event in node.step():
            if event.prompt_logprobs is not None:
                told = event.prompt_logprobs[scored[event.handle].first + 1 :]
                nats -= sum(entry.logprob for entry in told if entry is not None)
    return nats


def _weight_error(folder: Path, kept: str) -> float:
    source = ModelSource(str(folder), "nano")
    spec = spec_of(source)
    held = [(layer, e, e) for layer in range(spec.moe_layers) for e in range(spec.experts)]
    return build_expert_bank(source, held, spec.experts, expert_dtype=kept).rounding_error or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.nano.bits", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HOME, help="folder of the checkpoint")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--windows", type=int, help="at most so many windows of 1,024 tokens")
    parser.add_argument("--save", action="store_true", help="into training.json, and the card anew")
    options = parser.parse_args()
    if options.save and options.windows:
        parser.error("--save: all windows are wanted for the card; drop --windows")
    found = costs(options.out, options.windows, options.threads)
    if options.save:
        path = options.out / "training.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"expert_bits": found}, indent=1) + "\n")
        card.write(options.out)


if __name__ == "__main__":
    main()
