"""What `afserve place` shows of a placement: a table of its layers, and a heat map of node loads."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from afserve.errors import ConfigError
from afserve.placement.optimizer.outcome import Balanced
from afserve.placement.optimizer.problem import Floats, Problem
from afserve.placement.optimizer.split import node_load
from afserve.placement.placement import Placement
from afserve.placement.rebalance.copies import copies_in_words

_SHOWN = 40  # layers in the table; --json has all


def print_table(found: Balanced, problem: Problem, chosen: Sequence[str], plot: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    proof, console = found.certificate, Console()
    table = Table(
        "layer", "replicas", "hottest", "most replicas", "max load", "bound", "gap", box=None, pad_edge=False
    )
    for column in table.columns[1:]:
        column.justify = "right"
    share = problem.load_CLE.mean(0)
    for layer in range(min(len(proof.max_load), _SHOWN)):
        held = found.slot_LNS[layer][found.slot_LNS[layer] >= 0]
        hot, most = int(share[layer].argmax()), int(np.bincount(held).max())
        top, bound = proof.max_load[layer], proof.lower_bound[layer]
        gap = f"{top / bound - 1:.2%}" if bound > 0 else "-"
        table.add_row(str(layer), str(len(held)), str(hot), str(most), f"{top:,.0f}", f"{bound:,.0f}", gap)
    console.print(table)
    if len(proof.max_load) > _SHOWN:
        console.print(f"... and {len(proof.max_load) - _SHOWN} more layers (--json has all)")
    console.print(
        f"{len(chosen)} scenario(s): {', '.join(chosen[:8])}; {proof.gap:.2%} above the lower bound over all layers"
    )
    if problem.copies > 1:
        console.print(copies_in_words(found.placement(), problem.nodes.host))
    if problem.current is not None:
        console.print(f"{proof.reason} ({proof.moves} moves, at most {proof.busiest} into one node)")
    if plot is not None:
        console.print(f"heat map in {plot}")


def plot_loads(target: Path, found: Balanced, problem: Problem) -> None:
    """Node loads over the mean per layer: before (experts in order) or as it stands, and planned."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'afserve[plot]'") from error
    layers, experts = problem.load_CLE.shape[1:]
    before = problem.current or Placement.contiguous(layers=layers, experts=experts, nodes=len(problem.nodes))
    name = "now" if problem.current else "experts in order"
    heats = {name: _heat(before, problem), "planned": _heat(found.placement(), problem)}
    figure = Figure(figsize=(11, 1.6 + min(9.0, 0.18 * layers + 1)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, squeeze=False)[0]
    top = max(2.0, min(4.0, max(float(h.max()) for h in heats.values())))
    for panel, (title, heat) in zip(panels, heats.items(), strict=True):
        image = panel.imshow(heat, aspect="auto", vmin=0, vmax=top, cmap="magma", interpolation="nearest")
        panel.locator_params(integer=True)
        panel.set(
            title=f"{title}: max/mean {heat.max(1).mean():.3f}", xlabel="expert node", ylabel="MoE layer"
        )
    figure.colorbar(image, ax=panels, label="rows / mean")
    try:
        figure.savefig(target, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the heat map {target}: {error}") from error


def _heat(placement: Placement, problem: Problem) -> Floats:

    mean_LE = np.tensordot(problem.weights, problem.load_CLE, 1)
    level_LN = node_load(placement.slot_array(), placement.share_array(), mean_LE) / problem.nodes.pace()
    heat: Floats = level_LN / np.maximum(level_LN.mean(1, keepdims=True), 1e-300)
    return heat
