"""The plot of a load run: distributions of its times, and when they were how long. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from afserve.cli.load.heard import COMPLETED
from afserve.cli.load.loops import Ran
from afserve.errors import ConfigError

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by everyone
_DPI = 130


def draw(runs: Sequence[tuple[str, Ran]], path: Path) -> None:
    """One colour per run: shares of TTFT, of inter-token and of whole times, and TTFT over the run.

    Raises ConfigError where matplotlib is not installed or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot: needs matplotlib; pip install 'afserve[plot]'") from error
    figure = Figure(figsize=(10, 7), layout="constrained")
    shares = list(figure.subplots(2, 2).flat)
    titles = ("time to first token", "between tokens", "whole answer", "time to first token over the run")
    for axes, title in zip(shares, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(alpha=0.25)
        axes.set_xlabel("ms" if axes is not shares[3] else "s since the start", fontsize=9)
        axes.set_ylabel("share of requests" if axes is not shares[3] else "ms", fontsize=9)
    shares[1].set_ylabel("share of gaps", fontsize=9)
    for number, (name, ran) in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        done = [one for one in ran.heard if one.outcome == COMPLETED]
        firsts = [one.ttft * 1e3 for one in done]
        for axes, values in (
            (shares[0], firsts),
            (shares[1], [gap * 1e3 for one in done for gap in one.gaps]),
            (shares[2], [one.e2e * 1e3 for one in done]),
        ):
            if values:
                axes.ecdf(values, label=name, color=colour)
        began = min((one.sent for one in ran.heard), default=0.0)
        shares[3].plot([one.sent - began for one in done], firsts, ".", color=colour, label=name)
    if any(one.outcome == COMPLETED for _, ran in runs for one in ran.heard):
        shares[0].legend(frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=_DPI)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error
