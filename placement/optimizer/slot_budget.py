"""Divides one memory budget over the layers: how many slots each node gets in each layer.

It knows what a further slot saves in each layer, not how that is reached.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from afserve.errors import ConfigError
from afserve.placement.optimizer.outcome import Balanced, Certificate
from afserve.placement.optimizer.problem import Floats, Ints, Problem
from afserve.placement.placement import FREE

Solve = Callable[[Problem], Balanced]


def base_width(experts: int, live: int, layers: int, memory: int) -> int:
    """The slots a node needs in every layer; raises ConfigError where `memory` slots a node are too few."""
    width = -(-experts // live)
    if width * layers > memory:
        raise ConfigError(
            f"a memory budget of {memory} slots per node is too small: {layers} layers of {experts} replicas on {live} "
            f"live nodes need {width * layers}"
        )
    return width


def choose_widths(saving_L: Floats, base: int, cap: int, memory: int) -> Ints:
    """width_L, summing to at most `memory`: layers get spare slots by what the first one saves, around and around.

    One spare slot per node already allows the optimum for a known load (`pack`), so a second one saves nothing
    more there; it buys room against surprises, and layers that gained most from the first are the ones with the
    most skew.
    """
    order = np.argsort(-saving_L, kind="stable")
    width_L = np.full(len(saving_L), base)
    left = memory - int(width_L.sum())
    while left > 0 and width_L.min() < cap:
        width_L[order[:left]] += 1
        left -= len(order)
    capped: Ints = np.minimum(width_L, cap)
    return capped


def within_memory(problem: Problem, memory: int, solve: Solve) -> Balanced:
    """Solves each width's layers apart, after giving each layer the width at which spare slots save most."""
    layers, experts = problem.load_CLE.shape[1:]
    live = int((problem.nodes.usable_slots() > 0).sum())
    cap = max(problem.nodes.slots)
    protected = max(
        (sum(1 for at, _ in problem.protect if at == layer) for layer in range(layers)), default=0
    )
    base = base_width(experts * problem.copies + protected, live, layers, memory)
    saving_L = _largest(problem, base, solve) - _largest(problem, base + 1, solve)
    width_L = choose_widths(saving_L, base, max(cap, base), memory)
    parts = {
        int(w): solve(_narrowed(problem, np.flatnonzero(width_L == w), int(w))) for w in np.unique(width_L)
    }
    return _merged(parts, width_L, experts)


def _largest(problem: Problem, width: int, solve: Solve) -> Floats:
    layers = np.arange(problem.load_CLE.shape[1])
    return np.array(solve(_narrowed(problem, layers, width, fresh=True)).certificate.max_load)


def _narrowed(problem: Problem, layers: Ints, width: int, *, fresh: bool = False) -> Problem:
    """The problem of some layers at one width; the budget of moves goes by the number of layers."""
    slots = tuple(width if s > 0 else 0 for s in problem.nodes.slots)
    place = {int(layer): index for index, layer in enumerate(layers)}
    current, moves = None, None
    if problem.current is not None and not fresh:
        current = replace(problem.current, layers=tuple(problem.current.layers[i] for i in layers))
        moves = None if problem.moves is None else problem.moves * len(layers) // problem.load_CLE.shape[1]
    return replace(
        problem,
        load_CLE=problem.load_CLE[:, layers],
        nodes=replace(problem.nodes, slots=slots),
        memory=None,
        current=current,
        moves=moves,
        protect=frozenset((place[layer], e) for layer, e in problem.protect if layer in place),
    )


def _merged(parts: dict[int, Balanced], width_L: Ints, experts: int) -> Balanced:
    nodes = next(iter(parts.values())).slot_LNS.shape[1]
    slot = np.full((len(width_L), nodes, int(width_L.max())), FREE)
    share, width_LN = np.zeros(slot.shape), np.zeros((len(width_L), nodes), dtype=np.int64)
    figures = {
        name: np.zeros(len(width_L)) for name in ("max_load", "lower_bound", "seconds", "seconds_bound")
    }
    for width, part in parts.items():
        here = width_L == width
        slot[here, :, :width], share[here, :, :width] = part.slot_LNS, part.share_LNS
        width_LN[here] = part.width_LN
        for name, values in figures.items():
            values[here] = getattr(part.certificate, name) or 0.0
    proofs = [part.certificate for part in parts.values()]
    timed = bool(proofs[0].seconds)
    certificate = Certificate(
        tuple(figures["max_load"].tolist()),
        tuple(figures["lower_bound"].tolist()),
        tuple(figures["seconds"].tolist()) if timed else (),
        tuple(figures["seconds_bound"].tolist()) if timed else (),
        moves=sum(p.moves for p in proofs),
        busiest=sum(p.busiest for p in proofs),
        gain=float(np.mean([p.gain for p in proofs])),
        move_seconds=sum(p.move_seconds for p in proofs),
        worth_moving=any(p.worth_moving for p in proofs),
        reason="; ".join(dict.fromkeys(p.reason for p in proofs)),
    )
    return Balanced(slot, share, width_LN, experts, certificate)
