"""The loss curve as a picture. Knows curve.json and training.json, no tensor."""

import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

SMOOTH = 0.9


def write(folder: Path) -> None:
    """Write loss.png: bits per byte of training text against tokens, and the held-out figure as a line."""
    curve = json.loads((folder / "curve.json").read_text())
    facts = json.loads((folder / "training.json").read_text())
    held_out = facts["held_out"]
    bits = held_out["tokens"] / held_out["bytes"] / math.log(2)
    millions = [point["step"] * curve["tokens_per_step"] / 1e6 for point in curve["points"]]
    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=90)
    for key, label in {"loss": "next token", "mtp_loss": "the token after it (MTP)"}.items():
        axes.plot(millions, _smooth([point[key] * bits for point in curve["points"]]), label=label)
    final = held_out["bits_per_byte"]
    axes.axhline(final, color="black", linestyle="--", linewidth=1, label=f"held out, final: {final:.3f}")
    axes.set(xlabel="million tokens", ylabel="bits per byte", ylim=(1.0, 3.5), title="nano: training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "loss.png")
    pyplot.close(figure)


def _smooth(values: list[float]) -> list[float]:
    smooth, level = [], values[0]
    for value in values:
        level = SMOOTH * level + (1 - SMOOTH) * value
        smooth.append(level)
    return smooth
