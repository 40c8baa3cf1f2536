"""`python -m bench.nano.train`: from the standard library's sources to the folder configs/nano, in three stages.

The first learns text, the second facts beside text, the third, in the MTP module alone, drafts. Knows the order of the
work and nothing else: text, tokenizer, training, saving, held-out figures, card.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from shutil import copy
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from bench.nano import answers, checkpoint, corpus, facts, heldout, lessons, report, speed, stream, tokenizer
from bench.nano.corpus import Document
from bench.nano.facts import Fact
from bench.nano.shape import DRAFTS, FACTS, TEXT, Recipe, Shape
from bench.nano.trainer import Trainer

ASKED_EVERY, SAVED_EVERY = 100, 50


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    speed.keep_memory()
    if options.compile:
        speed.compile_functions()
    options.out.mkdir(parents=True, exist_ok=True)
    docs = corpus.documents()
    seen = [doc for doc in docs if not doc.held_out]
    bpe = _tokenizer(seen, options.start, options.out)
    said = _begun(options.start, options.out) if options.start else _text_stage(docs, bpe, options)
    if "facts" not in said:
        said |= _fact_stage(docs, bpe, options)
    said |= _draft_stage(docs, bpe, options)
    (options.out / "training.json").write_text(json.dumps(said, indent=1) + "\n")
    report.write(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train the bundled model from this interpreter's standard library."
    )
    parser.add_argument("--out", type=Path, default=report.HOME, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, help=f"of the stage that learns text ({TEXT.steps})")
    parser.add_argument("--fact-steps", type=int, help=f"of the stage that learns facts ({FACTS.steps})")
    parser.add_argument("--draft-steps", type=int, help=f"of the stage that learns drafts ({DRAFTS.steps})")
    parser.add_argument(
        "--start", type=Path, help="folder of an earlier stage's weights: only those behind it are run"
    )
    parser.add_argument("--state", type=Path, help="begin of the files to save progress in and resume from")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="do without a C++ compiler"
    )
    options = parser.parse_args()
    if options.start and options.steps:
        parser.error("--steps: the stage that learns text is not run with --start")
    learnt = json.loads((options.start / "training.json").read_text()) if options.start else {}
    if "drafts" in learnt:
        parser.error(f"--start {options.start}: has learnt drafts already; give a folder of an earlier stage")
    if "facts" in learnt and options.fact_steps:
        parser.error(f"--fact-steps: {options.start} has learnt facts already, so that stage is not run")
    return options


def _tokenizer(seen: list[Document], start: Path | None, out: Path) -> Tokenizer:
    """Learnt, or that of the weights to start from; saved either way."""
    if start:
        bpe = Tokenizer.from_file(str(start / "tokenizer.json"))
    else:
        bpe = tokenizer.build((doc.text for doc in seen), Shape().vocab)
    tokenizer.save(bpe, out, Shape().positions)
    return bpe


def _begun(start: Path, out: Path) -> dict[str, Any]:
    """What the stages that were run say of themselves; what they left is in the folder afterwards."""
    for name in ("model.safetensors", "config.json", "curve.json", "facts.json"):
        if (start / name).exists() and (start / name).resolve() != (out / name).resolve():
            copy(start / name, out / name)
    return dict(json.loads((start / "training.json").read_text()))


def _text_stage(docs: list[Document], bpe: Tokenizer, options: argparse.Namespace) -> dict[str, Any]:
    """Facts for the card; the weights and the curve are in the folder afterwards, rounded as they are served."""
    seen = [doc for doc in docs if not doc.held_out]
    dialogue = [turn for doc in seen for turn in corpus.turns(doc)]
    pieces = stream.encode_documents(bpe, seen)
    text_tokens = sum(map(len, pieces))
    pieces += stream.encode_turns(bpe, dialogue)
    said: dict[str, Any] = {
        "files": len(seen),
        "held_out_files": len(docs) - len(seen),
        "bytes": sum(len(doc.text.encode()) for doc in seen),
        "text_tokens": text_tokens,
        "dialogues": len(dialogue),
        "dialogue_tokens": sum(map(len, pieces)) - text_tokens,
        "fingerprint": corpus.fingerprint(docs),
    }
    print(json.dumps(said), flush=True)
    trainer = Trainer(Shape(), replace(TEXT, steps=options.steps or TEXT.steps), pieces)
    said |= _train(trainer, options, "text")
    said |= {"python": platform.python_version(), "torch": torch.__version__}
    return said


def _fact_stage(docs: list[Document], bpe: Tokenizer, options: argparse.Namespace) -> dict[str, Any]:
    """Starts from the rounded weights in the folder, so it is the same run whether the first stage ran before it."""
    learnt = facts.shortest(facts.known(docs), FACTS.facts)
    facts.write(options.out, learnt)
    trainer = _taught(docs, learnt, bpe, replace(FACTS, steps=options.fact_steps or FACTS.steps), options.out)
    asked = facts.drawn(learnt, answers.ASKED, answers.SEED)

    def remembers() -> str:
        share = lessons.recalled(trainer.model, bpe, asked, lessons.HELD_OUT[0])
        return f"{share:.1%} of {len(asked)} answers word for word"

    told = _train(trainer, options, "facts", remembers)
    return {"facts": {**told, "count": len(learnt), "wordings": len(lessons.WORDINGS)}}


def _draft_stage(docs: list[Document], bpe: Tokenizer, options: argparse.Namespace) -> dict[str, Any]:
    """Teaches the MTP module what the model itself would say; every other weight stays as it is in the folder."""
    held_out = {doc.path: doc.text for doc in docs if doc.held_out}
    chosen = heldout.sample(held_out, report.SAMPLE_BYTES)
    before = heldout.evaluate(checkpoint.load(options.out), bpe, list(chosen.values())).mtp_agreement
    print(f"drafts: {before:.1%} of the sample's are the model's own choice before this stage", flush=True)
    recipe = replace(DRAFTS, steps=options.draft_steps or DRAFTS.steps)
    trainer = _taught(docs, facts.read(options.out), bpe, recipe, options.out)
    return {"drafts": {**_train(trainer, options, "drafts"), "mtp_agreement_before": before}}


def _taught(docs: list[Document], learnt: list[Fact], bpe: Tokenizer, recipe: Recipe, out: Path) -> Trainer:
    """Of a later stage: the folder's weights, text without explanations, conversations about facts."""
    seen = [doc for doc in docs if not doc.held_out]
    written = [turn for doc in seen for turn in corpus.turns(doc) if not corpus.explains(turn)]
    pieces = stream.encode_documents(bpe, seen) + stream.encode_turns(bpe, written)
    taught = lessons.Lessons(bpe, learnt, recipe.lesson_length, recipe.seed)
    return Trainer(checkpoint.load(out), recipe, pieces, taught)


def _train(
    trainer: Trainer, options: argparse.Namespace, stage: str, tell: Callable[[], str] | None = None
) -> dict[str, Any]:
    state = options.state and options.state.with_name(f"{options.state.name}.{stage}")
    said: dict[str, Any] = {}
    if state and state.exists():
        trainer.resume(state)
        print(f"{stage}: resumed at step {trainer.step}", flush=True)
        if trainer.step < trainer.recipe.steps:
            said["resumed_at"] = trainer.step
    _follow(trainer, state, stage, tell)
    checkpoint.save(trainer.model, options.out)
    _write_curve(trainer, options.out / "curve.json", stage)
    said |= {"recipe": asdict(trainer.recipe), "cpu_minutes": round(trainer.seconds / 60, 1)}
    return said | {"threads": options.threads}


def _follow(trainer: Trainer, state: Path | None, stage: str, tell: Callable[[], str] | None) -> None:
    columns = (
        TextColumn(stage + " step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=trainer.recipe.steps, completed=trainer.step)
        for point in trainer.run():
            line = f"loss {point.loss:.3f}  mtp {point.mtp_loss:.3f}"
            if point.answer_loss is not None:
                line += f"  answers {point.answer_loss:.3f}"
            if tell and point.step % ASKED_EVERY == 0:
                progress.console.print(f"step {point.step}: {tell()}")
            progress.update(task, completed=point.step, description=line)
            if not progress.console.is_terminal and point.step % 10 == 0:
                print(f"{time.strftime('%H:%M:%S')} {stage} step {point.step} {line}", flush=True)
            if state and (point.step % SAVED_EVERY == 0 or point.step == trainer.recipe.steps):
                trainer.save(state)


def _write_curve(trainer: Trainer, path: Path, stage: str, every: int = 10) -> None:
    """Add this stage's points; the first stage begins the file anew."""
    points = [asdict(p) for p in trainer.curve if p.step % every == 0 or p.step == 1]
    ours = {"points": points, "tokens_per_step": trainer.recipe.tokens}
    found = ours if stage == "text" else {**json.loads(path.read_text()), stage: ours}
    path.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
