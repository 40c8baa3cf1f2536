"""`python -m bench.nano.train`: from the standard library's sources to the folder configs/nano.

Knows the order of the work and nothing else: text, tokenizer, training, saving, held-out figures, card.
"""

import argparse
import json
import platform
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.nano import checkpoint, corpus, report, speed, stream, tokenizer
from bench.nano.corpus import Document
from bench.nano.shape import Recipe, Shape
from bench.nano.trainer import Trainer


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    speed.keep_memory()
    if options.compile:
        speed.compile_functions()
    recipe = replace(Recipe(), steps=options.steps or Recipe().steps)
    options.out.mkdir(parents=True, exist_ok=True)
    pieces, facts = _prepare(corpus.documents(), options.out)
    trainer = Trainer(Shape(), recipe, pieces)
    if options.state and options.state.exists():
        trainer.resume(options.state)
        facts["resumed_at"] = trainer.step
        print(f"resumed at step {trainer.step}", flush=True)
    _train(trainer, options.state)
    checkpoint.save(trainer.model, options.out)
    curve = {"points": [asdict(p) for p in trainer.curve], "tokens_per_step": recipe.tokens}
    (options.out / "curve.json").write_text(_compact(curve, every=10))
    facts |= {
        "recipe": asdict(recipe),
        "cpu_minutes": round(trainer.seconds / 60, 1),
        "threads": options.threads,
    }
    facts |= {"python": platform.python_version(), "torch": torch.__version__}
    (options.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    report.write(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train the bundled model from this interpreter's standard library."
    )
    parser.add_argument("--out", type=Path, default=report.HOME, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, help="fewer steps for a trial run")
    parser.add_argument("--state", type=Path, help="file to save progress in, and to resume from")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="do without a C++ compiler"
    )
    return parser.parse_args()


def _prepare(docs: list[Document], out: Path) -> tuple[list[np.ndarray], dict[str, object]]:
    """Token ids of every training piece and the facts for the card; the tokenizer is saved."""
    seen = [doc for doc in docs if not doc.held_out]
    bpe = tokenizer.build((doc.text for doc in seen), Shape().vocab)
    tokenizer.save(bpe, out, Shape().positions)
    dialogue = [turn for doc in seen for turn in corpus.turns(doc)]
    pieces = stream.encode_documents(bpe, seen)
    text_tokens = sum(map(len, pieces))
    pieces += stream.encode_turns(bpe, dialogue)
    facts = {
        "files": len(seen),
        "held_out_files": len(docs) - len(seen),
        "bytes": sum(len(doc.text.encode()) for doc in seen),
        "text_tokens": text_tokens,
        "dialogues": len(dialogue),
        "dialogue_tokens": sum(map(len, pieces)) - text_tokens,
        "fingerprint": corpus.fingerprint(docs),
    }
    print(json.dumps(facts), flush=True)
    return pieces, facts


def _train(trainer: Trainer, state: Path | None) -> None:
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=trainer.recipe.steps, completed=trainer.step)
        for point in trainer.run():
            line = f"loss {point.loss:.3f}  mtp {point.mtp_loss:.3f}"
            progress.update(task, completed=point.step, description=line)
            if not progress.console.is_terminal and point.step % 10 == 0:
                print(f"{time.strftime('%H:%M:%S')} step {point.step} {line}", flush=True)
            if state and point.step % 100 == 0:
                trainer.save(state)


def _compact(curve: dict[str, Any], every: int) -> str:
    points = [p for p in curve["points"] if p["step"] % every == 0 or p["step"] == 1]
    return json.dumps({**curve, "points": points}) + "\n"


if __name__ == "__main__":
    main()
