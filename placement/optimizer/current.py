"""The current placement as a start for the next one: drops dead nodes, places lost experts again, keeps the rest.

Arrays in, arrays out. It makes only the moves that cannot be avoided. Of the loads it knows no more than which expert
is more important.
"""

import numpy as np
from numpy.typing import NDArray

from afserve.placement.optimizer.problem import Floats, Ints
from afserve.placement.optimizer.split import count_replicas
from afserve.placement.placement import FREE, Placement

Flags = NDArray[np.bool_]


def adopt(current: Placement, room_N: Ints, least_LE: Ints, load_LE: Floats) -> Ints:
    """slot_LNS on the usable slots, every expert at least `least` times: what the new plan may start from."""
    old = current.slot_array()
    width = int(room_N.max(initial=1))
    slot = np.full((len(old), len(room_N), width), FREE)
    kept = min(width, old.shape[2])
    slot[:, :, :kept] = old[:, :, :kept]
    slot[:, np.arange(width) >= room_N[:, None]] = FREE
    whole_L = (count_replicas(slot, len(load_LE[0])) >= least_LE).all(1)
    for layer in np.flatnonzero(~whole_L):
        _rescue_overflow(old[layer], slot[layer], room_N)
        _restore(slot[layer], room_N, least_LE[layer], load_LE[layer])
    return slot


def count_moves(old_LNS: Ints, new_LNS: Ints, experts: int) -> Ints:
    """moves_LN: experts that each node must fetch."""
    layers, nodes, _ = new_LNS.shape
    held = np.zeros((layers, nodes, experts + 1), dtype=bool)
    row, node = np.arange(layers)[:, None, None], np.arange(nodes)[:, None]
    held[row, node, old_LNS] = True  # FREE marks the last column
    fetched = ~held[row, node, new_LNS] & (new_LNS != FREE)
    moves: Ints = fetched.sum(2)
    return moves


def relabel(old_LNS: Ints, new_LNS: Ints, experts: int, kind_N: Ints) -> Ints:
    """The node order of new_LNS, per layer, that keeps most experts in place; only nodes of one kind trade.

    Greedy on the overlap. Returns from_LN: new node n should hold what new_LNS has at from_LN[l, n].
    """
    layers, nodes, _ = new_LNS.shape
    row, node = np.arange(layers)[:, None, None], np.arange(nodes)[:, None]
    had = np.zeros((layers, nodes, experts + 1), dtype=np.float32)
    has = np.zeros_like(had)
    had[row, node, old_LNS] = 1.0
    has[row, node, new_LNS] = 1.0
    overlap = np.matmul(had[:, :, :experts], has[:, :, :experts].transpose(0, 2, 1))
    overlap[:, kind_N[:, None] != kind_N] = -1.0
    origin_LN = np.zeros((layers, nodes), dtype=np.int64)
    line = np.arange(layers)
    for _ in range(nodes):
        to, source = np.divmod(overlap.reshape(layers, -1).argmax(1), nodes)
        origin_LN[line, to] = source
        overlap[line, to, :] = -2.0
        overlap[line, :, source] = -2.0
    return origin_LN


def align(old_LNS: Ints, new_LNS: Ints, share_LNS: Floats) -> tuple[Ints, Floats]:
    """The same nodes' contents with every expert that stays in the slot it has."""
    slot, share = np.full_like(new_LNS, FREE), np.zeros_like(share_LNS)
    width = min(old_LNS.shape[2], new_LNS.shape[2])
    same = (old_LNS[:, :, :width, None] == new_LNS[:, :, None, :]) & (new_LNS != FREE)[:, :, None, :]
    for layer, node in np.argwhere((new_LNS != FREE).any(2)):
        keep_to, keep_from = np.nonzero(same[layer, node])
        rest = np.setdiff1d(np.flatnonzero(new_LNS[layer, node] != FREE), keep_from)
        open_slots = np.setdiff1d(np.arange(new_LNS.shape[2]), keep_to)[: len(rest)]
        to, source = np.concatenate([keep_to, open_slots]), np.concatenate([keep_from, rest])
        slot[layer, node, to] = new_LNS[layer, node, source]
        share[layer, node, to] = share_LNS[layer, node, source]
    return slot, share


def _rescue_overflow(old_NS: Ints, slot_NS: Ints, room_N: Ints) -> None:
    """A live node that shrank keeps its experts in whatever usable slots are empty."""
    for node in np.flatnonzero(room_N > 0):
        lost = [e for e in old_NS[node] if e != FREE and e not in slot_NS[node]]
        for place, expert in zip(np.flatnonzero(slot_NS[node, : room_N[node]] == FREE), lost, strict=False):
            slot_NS[node, place] = expert


def _restore(slot_NS: Ints, room_N: Ints, least_E: Ints, load_E: Floats) -> None:
    """Puts every expert that stands too seldom into an empty slot, or over a replica that can be spared."""
    copies = np.bincount(slot_NS[slot_NS != FREE], minlength=len(load_E))
    missing = [e for e in np.argsort(-load_E, kind="stable") for _ in range(int(least_E[e] - copies[e]))]
    for expert in missing:
        _place(slot_NS, room_N, least_E, load_E, copies, int(expert))


def _place(slot_NS: Ints, room_N: Ints, least_E: Ints, load_E: Floats, copies: Ints, expert: int) -> None:
    nodes, width = slot_NS.shape
    usable = np.arange(width) < room_N[:, None]
    fair = (slot_NS != expert).all(1)[:, None] & usable
    held = np.maximum(slot_NS, 0)
    value = np.where(slot_NS == FREE, -1.0, load_E[held] / np.maximum(copies[held], 1))
    allowed = fair & ((slot_NS == FREE) | (copies[held] > least_E[held]))
    if not allowed.any():
        allowed = _hand_over(slot_NS, usable, copies, least_E, expert)
    if not allowed.any():
        return
    load_N = (np.where(slot_NS == FREE, 0.0, value)).sum(1)
    best = np.where(allowed, value * nodes * width + load_N[:, None], np.inf).argmin()
    node, slot = divmod(int(best), width)
    if slot_NS[node, slot] != FREE:
        copies[slot_NS[node, slot]] -= 1
    slot_NS[node, slot] = expert
    copies[expert] += 1


def _hand_over(slot_NS: Ints, usable: Flags, copies: Ints, least_E: Ints, expert: int) -> Flags:
    """Every open slot's node holds `expert` already: pass another node's expert there, and open its slot instead."""
    held = np.maximum(slot_NS, 0)
    spare = usable & ((slot_NS == FREE) | (copies[held] > least_E[held]))
    opened = np.zeros_like(usable)
    for to, place in np.argwhere(spare):
        for node, slot in np.argwhere((slot_NS != FREE) & (slot_NS != expert).all(1)[:, None]):
            if slot_NS[node, slot] not in slot_NS[to]:
                if slot_NS[to, place] != FREE:
                    copies[slot_NS[to, place]] -= 1
                slot_NS[to, place], slot_NS[node, slot] = slot_NS[node, slot], FREE
                opened[node, slot] = True
                return opened
    return opened
