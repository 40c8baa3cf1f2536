"""`python -m bench.nano.report`: measures a trained folder on held-out text and writes its card and plot.

Knows no training: it reads the folder, the facts that training left in training.json, and the interpreter's library.
"""

import argparse
import json
import lzma
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.nano import answers, bits, card, checkpoint, corpus, heldout, plot, speed, writing
from bench.nano.model import Nano

HOME = Path(__file__).parents[2] / "configs" / "nano"
SAMPLE_BYTES = 120_000
SAMPLE_TOKENS = 80


def write(folder: Path) -> None:
    """Held-out figures (the committed sample in float32, all files in bfloat16), the plot and the card."""
    model, bpe = checkpoint.load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = {doc.path: doc.text for doc in corpus.documents() if doc.held_out}
    chosen = heldout.sample(texts, SAMPLE_BYTES)
    (folder / "heldout.json").write_text(json.dumps(chosen, indent=0) + "\n")
    facts = json.loads((folder / "training.json").read_text())
    facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    facts["megabytes"] = round((folder / "model.safetensors").stat().st_size / 1e6, 1)
    joined = "".join(texts.values()).encode()
    facts["xz_bits_per_byte"] = round(len(lzma.compress(joined, preset=9)) * 8 / len(joined), 4)
    facts["sample_tokens"] = SAMPLE_TOKENS
    facts["samples"] = [writing.greedy(model, bpe, prompt, SAMPLE_TOKENS) for prompt in writing.PROMPTS]
    facts["sample"] = asdict(heldout.evaluate(model, bpe, list(chosen.values())))
    print("sample, float32", json.dumps(facts["sample"]), flush=True)
    facts["held_out"] = asdict(heldout.evaluate(in_bfloat16(model), bpe, list(texts.values())))
    print("held out, bfloat16", json.dumps(facts["held_out"]), flush=True)
    facts["expert_bits"] = bits.costs(folder)
    facts["answers"] = answers.shares(folder, answers.ASKED, answers.SEED)
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    plot.write(folder)
    card.write(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def in_bfloat16(model: Nano) -> Nano:
    """The same model with matrices and activations in bfloat16, as it is served."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data = parameter.data.bfloat16()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure a trained nano on held-out text and write its card."
    )
    parser.add_argument("--out", type=Path, default=HOME, help="folder of the checkpoint")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    speed.keep_memory()
    write(options.out)


if __name__ == "__main__":
    main()
