"""The loss curve as a picture. Knows curve.json and training.json, no tensor."""

import json
import math
from pathlib import Path

SMOOTH = 0.9


def write(folder: Path) -> None:
    """Write loss.png: bits per byte of training text with the held-out figure, and the loss on answers."""
    from matplotlib.figure import Figure  # here: who trains, or tests that, needs no plots

    curve = json.loads((folder / "curve.json").read_text())
    facts = json.loads((folder / "training.json").read_text())
    held_out = facts["held_out"]
    bits = held_out["tokens"] / held_out["bytes"] / math.log(2)
    figure = Figure(figsize=(10, 3.6), dpi=90)
    text, answers = figure.subplots(1, 2, width_ratios=(3, 2))
    final = held_out["bits_per_byte"]
    seen = 0.0
    for stage in (curve, curve["facts"]):
        millions = [seen + point["step"] * stage["tokens_per_step"] / 1e6 for point in stage["points"]]
        for key, color in {"loss": "C0", "mtp_loss": "C1"}.items():
            text.plot(millions, _smooth([point[key] * bits for point in stage["points"]]), color=color)
        seen = millions[-1]
    text.axvline(curve["points"][-1]["step"] * curve["tokens_per_step"] / 1e6, color="grey", linewidth=1)
    text.axhline(final, color="black", linestyle="--", linewidth=1)
    text.set(xlabel="million tokens", ylabel="bits per byte", ylim=(1.0, 3.5), title="nano: text")
    text.legend(text.lines[:2], ["next token", "the token after it (MTP)"])
    points = curve["facts"]["points"]
    answers.plot([p["step"] for p in points], _smooth([p["answer_loss"] for p in points]), color="C2")
    answers.set(
        xlabel="step of the second stage", ylabel="nats per token", title="nano: answers", yscale="log"
    )
    for axes in (text, answers):
        axes.grid(alpha=0.3)
    text.annotate(f"held out: {final:.3f}", (seen, final), ha="right", va="top")
    figure.tight_layout()
    figure.savefig(folder / "loss.png")


def _smooth(values: list[float]) -> list[float]:
    smooth, level = [], values[0]
    for value in values:
        level = SMOOTH * level + (1 - SMOOTH) * value
        smooth.append(level)
    return smooth
