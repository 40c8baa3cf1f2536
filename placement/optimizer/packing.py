"""The exact placement for one known load: every node equally loaded, by construction.

Theorem. N nodes of equal speed, s slots each, N * (s - 1) >= E experts: a placement exists in which every
node's load is the mean, and no expert stands twice on a node. Proof (of `_window`, by induction over nodes):
pad with experts of load 0 to m = N (s - 1), sort by load, let T be the mean node load. Among windows of s - 1
neighbours the lightest has load <= T and the heaviest >= T, so some window A has load <= T while the window one
to the right has more (or A is the last window and has T). That one differs from A by one expert e, so load(A) +
load(e) >= T: the node takes all of A and the part of e that fills it to T. Left are m - (s - 1) experts, e
among them with its rest, of total (N - 1) T. The mean is also a lower bound, so this is optimal. With unequal
speeds or widths the same step is tried node by node and may fail.

`_alias` is the quick form of the same idea (Vose's alias tables): s - 1 experts a node in snake order, then
each lightest node fills its last slot from the largest expert of the heaviest. Where a donor's largest expert
is too small, `_window` decides.
"""

import numpy as np
from numpy.typing import NDArray

from afserve.placement.optimizer.problem import Floats, Ints
from afserve.placement.placement import FREE

_TINY = 1e-12


def pack(load_LE: Floats, room_N: Ints, pace_N: Floats) -> tuple[Ints, Floats, NDArray[np.bool_]]:
    """(slot_LNS, share_LNS, exact_L). Where exact_L is False that layer's slots mean nothing."""
    layers, experts = load_LE.shape
    live = np.flatnonzero(room_N > 0)
    slot_LNS = np.full((layers, len(room_N), int(room_N.max(initial=1))), FREE)
    share_LNS = np.zeros(slot_LNS.shape)
    if (room_N[live] - 1).sum() < experts:
        return slot_LNS, share_LNS, np.zeros(layers, dtype=bool)
    exact_L = np.zeros(layers, dtype=bool)
    if (room_N == room_N[0]).all() and np.ptp(pace_N) == 0.0:
        slot_LNS, share_LNS, exact_L = _alias(load_LE, len(room_N), int(room_N[0]))
    for layer in np.flatnonzero(~exact_L):
        found = _window(load_LE[layer], room_N, pace_N)
        exact_L[layer] = found is not None
        if found is not None:
            slot_LNS[layer], share_LNS[layer] = found
    return slot_LNS, share_LNS, exact_L


def _alias(load_LE: Floats, nodes: int, width: int) -> tuple[Ints, Floats, NDArray[np.bool_]]:
    layers, experts = load_LE.shape
    order_LE = np.argsort(-load_LE, axis=1)
    deep = -(-experts // nodes)
    dealt = np.full((layers, deep * nodes), FREE)
    dealt[:, :experts] = order_LE
    dealt = dealt.reshape(layers, deep, nodes)
    dealt[:, 1::2] = dealt[:, 1::2, ::-1]
    row = np.arange(layers)
    known = np.where(dealt == FREE, 0.0, load_LE[row[:, None, None], dealt])
    level_LN = known.sum(1)
    left_LN = known[:, 0].copy()
    mean_L = level_LN.mean(1)
    donor_LN, given_LN, fits_L = _fill_lightest(level_LN, left_LN, mean_L)

    slot = np.full((layers, nodes, width), FREE)
    slot[:, :, :deep] = dealt.transpose(0, 2, 1)
    alias_LN = np.where(donor_LN < 0, FREE, dealt[row[:, None], 0, donor_LN])
    slot[:, :, -1] = alias_LN
    share = (slot != FREE) * 1.0
    top_LN = known[:, 0]
    safe = np.where(top_LN > 0, top_LN, 1.0)
    share[:, :, 0] = np.where(dealt[:, 0] == FREE, 0.0, np.where(top_LN > 0, left_LN / safe, 1.0))
    share[:, :, -1] = np.where(alias_LN == FREE, 0.0, given_LN / safe[row[:, None], donor_LN])
    return slot, share, fits_L


def _fill_lightest(
    level_LN: Floats, left_LN: Floats, mean_L: Floats
) -> tuple[Ints, Floats, NDArray[np.bool_]]:
    """(donor_LN, given_LN, fits_L): in turn the heaviest node fills the lightest to the mean. Changes its inputs.

    A filled node stands exactly at the mean, so it is the lightest or the heaviest only when all are done.
    """
    layers, nodes = level_LN.shape
    row = np.arange(layers)
    donor_LN = np.full((layers, nodes), -1)
    given_LN = np.zeros((layers, nodes))
    slack_L = _TINY * mean_L
    fits_L = np.ones(layers, dtype=bool)
    for _ in range(nodes):
        low, high = level_LN.argmin(1), level_LN.argmax(1)
        need = mean_L - level_LN[row, low]
        act = need > slack_L
        if not act.any():
            break
        rest = left_LN[row, high] - need
        fits_L &= ~act | (rest >= -slack_L)
        on, at, by = row[act], low[act], high[act]
        donor_LN[on, at] = by
        given_LN[on, at] = need[act]
        level_LN[on, by] -= need[act]
        level_LN[on, at] = mean_L[act]
        left_LN[on, by] = np.maximum(rest[act], 0.0)
    return donor_LN, given_LN, fits_L


def _window(load_E: Floats, room_N: Ints, pace_N: Floats) -> tuple[Ints, Floats] | None:
    """(slot_NS, share_NS), every node at the mean; None where a step fails (never at equal speed and width)."""
    live = np.flatnonzero(room_N > 0)
    total = load_E.sum()
    slot_NS = np.full((len(room_N), int(room_N.max())), FREE)
    share_NS = np.zeros(slot_NS.shape)
    dummies = int((room_N[live] - 1).sum()) - len(load_E)
    who = np.concatenate([np.full(dummies, FREE), np.arange(len(load_E))])
    left = np.concatenate([np.zeros(dummies), load_E])
    target_N = total * pace_N / pace_N[live].sum()
    for node in sorted(live, key=lambda n: -target_N[n] / max(1, room_N[n] - 1)):
        order = np.argsort(left, kind="stable")
        who, left = who[order], left[order]
        taken = _take(who, left, int(room_N[node]) - 1, float(target_N[node]), _TINY * total)
        if taken is None:
            return None
        picks, parts = taken
        slot_NS[node, : len(picks)] = who[picks]
        share_NS[node, : len(picks)] = parts
        left[picks] -= parts
        gone = np.zeros(len(left), dtype=bool)
        gone[picks[: int(room_N[node]) - 1]] = True
        who, left = who[~gone], left[~gone]
    return _as_shares(slot_NS, share_NS, load_E)


def _take(who: Ints, left: Floats, whole: int, target: float, slack: float) -> tuple[Ints, Floats] | None:
    """(positions, loads) of `whole` full experts and, last, the part of one more that reaches `target`."""
    prefix = np.concatenate([[0.0], np.cumsum(left)])
    sums = prefix[whole:] - prefix[: len(prefix) - whole]
    fits = np.flatnonzero(sums <= target + slack)
    if len(fits) == 0:
        return None
    first = int(fits[-1])
    picks, need = np.arange(first, first + whole), target - sums[first]
    if need <= slack or first + whole == len(left):
        return (picks, left[picks]) if need <= slack else None
    extra = first + whole
    if left[extra] < need - slack or who[extra] == FREE:
        return None
    return np.append(picks, extra), np.append(left[picks], min(need, left[extra]))


def _as_shares(slot_NS: Ints, rows_NS: Floats, load_E: Floats) -> tuple[Ints, Floats]:
    """Rows to shares that sum to exactly 1; an expert without load keeps its first replica."""
    rows_NS = np.where(slot_NS == FREE, 0.0, rows_NS)
    flat = slot_NS.ravel()
    held = flat != FREE
    sums = np.bincount(flat[held], weights=rows_NS.ravel()[held], minlength=len(load_E))
    first = np.zeros(len(flat), dtype=bool)
    first[np.unique(np.where(held, flat, flat.max() + 1), return_index=True)[1]] = True
    idle = held & first & (sums[flat] <= 0)
    share = np.where(
        held & (sums[flat] > 0), rows_NS.ravel() / np.where(sums[flat] > 0, sums[flat], 1.0), idle * 1.0
    )
    return slot_NS, share.reshape(slot_NS.shape)
