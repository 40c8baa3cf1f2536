"""Divides each expert's rows over its replicas, optimally, for a given placement.

    minimise  sum_n speed_n/2 * (load_n / speed_n)^2 + sum_k risk_e/2 * y_k^2    over y >= 0, sum_k y_k = load_e

Without risk the optimum of this convex program is the lexicographic min-max: the same y minimises the largest load_n /
speed_n, then the second largest, and so on. (On a polymatroid base the least-squares point is also the least-majorised
one; Fujishige 1980.) Example: expert a with 60 rows stands on nodes 0 and 1, and node 0 has 50 rows of its own, node 1
has 10; the split 10 and 50 gives both 60. With risk the objective is mean^2 + variance of the nodes' loads for
independent experts. A primal-dual interior-point method solves it; its unknowns are the experts with two or more
replicas. It knows no moves.
"""

import numpy as np
from numpy.typing import NDArray

from afserve.placement.optimizer.problem import Floats, Ints
from afserve.placement.placement import FREE

_HUGE = 1e30
_CHUNK = 4_000_000  # elements of one dense (batch, expert, node) array: 32 MB
_DENSE_NODES = 192  # above, the interior point's N x N systems take longer than they are worth
_NEWTON_STEPS = 60
_MIRROR_STEPS, _MIRROR_PATIENCE = 200, 8


def split(
    slot_LNS: Ints,
    load_LE: Floats,
    pace_N: Floats,
    risk_LE: Floats | None = None,
    *,
    tolerance: float = 1e-8,
    quick: bool = False,
) -> Floats:
    """share_LNS: the optimal share of each slot's expert, within `tolerance` of the optimum (relative to the mean).

    Above 192 nodes, or if `quick`, an approximate one, by mirror descent without risk; the certificate's gap then
    says how far it is.

    Shapes: L layers (or layer x scenario), N nodes, S slots per node, E experts. Every expert stands somewhere.
    """
    layers, nodes, _ = slot_LNS.shape
    experts = load_LE.shape[1]
    replicas_LE = count_replicas(slot_LNS, experts)
    share_LNS = np.where(slot_LNS == FREE, 0.0, 1.0)
    width = int((replicas_LE > 1).sum(1).max(initial=0))
    if width == 0:
        return share_LNS
    if nodes > _DENSE_NODES or quick:
        return _mirror(slot_LNS, load_LE, pace_N, replicas_LE)
    chunk = max(1, _CHUNK // (width * nodes))
    for start in range(0, layers, chunk):
        part = slice(start, start + chunk)
        risk = None if risk_LE is None else risk_LE[part]
        share_LNS[part] = _split(slot_LNS[part], load_LE[part], pace_N, risk, replicas_LE[part], tolerance)
    return share_LNS


def count_replicas(slot_LNS: Ints, experts: int) -> Ints:
    """replicas_LE: how many slots hold each expert."""
    layers = len(slot_LNS)
    flat = slot_LNS.reshape(layers, -1) + 1 + (experts + 1) * np.arange(layers)[:, None]
    counts = np.bincount(flat.ravel(), minlength=layers * (experts + 1)).reshape(layers, experts + 1)
    return counts[:, 1:].astype(np.int64)


def node_load(slot_LNS: Ints, share_LNS: Floats, load_LE: Floats) -> Floats:
    """load_LN: rows that each node receives."""
    layer = np.arange(len(slot_LNS))[:, None, None]
    load: Floats = (load_LE[layer, np.maximum(slot_LNS, 0)] * share_LNS).sum(2)
    return load


def _split(
    slot_LNS: Ints,
    load_LE: Floats,
    pace_N: Floats,
    risk_LE: Floats | None,
    replicas_LE: Ints,
    tolerance: float,
) -> Floats:
    layers, nodes, _ = slot_LNS.shape
    several_LE = replicas_LE > 1
    width = int(several_LE.sum(1).max())
    chosen_LM = np.argsort(~several_LE, axis=1, kind="stable")[:, :width]
    rank_LE = np.full(replicas_LE.shape, width)
    row = np.arange(layers)[:, None]
    rank_LE[row, chosen_LM] = np.where(several_LE[row, chosen_LM], np.arange(width), width)
    rank_LNS = np.where(slot_LNS == FREE, width, rank_LE[row[:, :, None], np.maximum(slot_LNS, 0)])

    held_LMN = np.zeros((layers, width + 1, nodes), dtype=bool)
    held_LMN[row[:, :, None], rank_LNS, np.arange(nodes)[:, None]] = True
    held_LMN = held_LMN[:, :width]
    scale_L = np.maximum(load_LE.sum(1) / pace_N.sum(), 1e-300)
    single_LE = np.where(several_LE, 0.0, load_LE) / scale_L[:, None]
    base_LN = node_load(slot_LNS, (slot_LNS != FREE) * 1.0, single_LE)
    load_LM = np.maximum(load_LE[row, chosen_LM] / scale_L[:, None], 1e-9)
    risk_LM = np.zeros_like(load_LM) if risk_LE is None else risk_LE[row, chosen_LM]
    rows_LMN = _interior_point(held_LMN, base_LN, load_LM, risk_LM, pace_N, tolerance)

    fraction_LMN = rows_LMN / np.maximum(rows_LMN.sum(2, keepdims=True), 1e-300)
    padded = np.concatenate([fraction_LMN, np.ones((layers, 1, nodes))], axis=1)
    share: Floats = padded[row[:, :, None], rank_LNS, np.arange(nodes)[:, None]]
    return np.where(slot_LNS == FREE, 0.0, share)


def _mirror(slot_LNS: Ints, load_LE: Floats, pace_N: Floats, replicas_LE: Ints) -> Floats:
    """Shares shrink by exp(-level) and are scaled back to 1, from the even split on; the best iterate of each layer."""
    layers, experts = load_LE.shape
    layer, who = np.arange(layers)[:, None, None], np.maximum(slot_LNS, 0)
    group = (who + experts * layer).ravel()
    share = np.where(slot_LNS == FREE, 0.0, 1.0 / np.maximum(replicas_LE[layer, who], 1))
    rows = load_LE / np.maximum(load_LE.sum(1) / pace_N.sum(), 1e-300)[:, None]
    best, lowest_L, stale = share.copy(), np.full(layers, np.inf), 0
    for _ in range(_MIRROR_STEPS):
        level_LN = node_load(slot_LNS, share, rows) / pace_N
        top_L = level_LN.max(1)
        stale = 0 if (top_L < lowest_L * 0.999).any() else stale + 1
        if stale > _MIRROR_PATIENCE:
            break
        better = top_L < lowest_L
        best[better], lowest_L[better] = share[better], top_L[better]
        share = share * np.exp(-level_LN / np.maximum(top_L, 1.0)[:, None])[:, :, None]
        total = np.bincount(group, weights=share.ravel(), minlength=layers * experts)
        share = share / np.maximum(total, 1e-300)[group].reshape(share.shape)
    return best


def _interior_point(
    held_LMN: NDArray[np.bool_],
    base_LN: Floats,
    load_LM: Floats,
    risk_LM: Floats,
    pace_N: Floats,
    tolerance: float,
) -> Floats:
    """rows_LMN. Starts from the even split, so every iterate is feasible and dual slack stays exact."""
    count_LM = np.maximum(held_LMN.sum(2), 1)
    y = np.where(held_LMN, (load_LM / count_LM)[:, :, None], 0.0)
    level = (base_LN + y.sum(1)) / pace_N
    price = level[:, None, :] + risk_LM[:, :, None] * y
    floor = np.where(held_LMN, price, _HUGE).min(2) - 0.1
    z = np.where(held_LMN, price - floor[:, :, None], 1.0)
    edges = np.maximum(held_LMN.sum((1, 2)), 1)
    for _ in range(_NEWTON_STEPS):
        gap = (y * z).sum((1, 2))
        if gap.max() <= tolerance:
            break
        try:
            dy, dz = _newton(held_LMN, y, z, risk_LM, pace_N, 0.1 * gap / edges)
        except (
            np.linalg.LinAlgError
        ):  # a singular system of one layer, by rounding: what there is, is feasible
            break
        if not (np.isfinite(dy).all() and np.isfinite(dz).all()):
            break
        step = _longest(y, dy, z, dz)[:, None, None]
        y += step * dy
        z += step * dz
    return y


def _newton(
    held_LMN: NDArray[np.bool_], y: Floats, z: Floats, risk_LM: Floats, pace_N: Floats, centre_L: Floats
) -> tuple[Floats, Floats]:
    """The step of (y, z). Eliminating experts leaves one symmetric N x N system per layer for the levels."""
    stiff = z + y * risk_LM[:, :, None]
    d = y / stiff
    c = np.where(held_LMN, (centre_L[:, None, None] - y * z) / stiff, 0.0)
    d_M = np.maximum(d.sum(2), 1e-300)
    c_M = c.sum(2)
    system = -np.matmul((d / d_M[:, :, None]).transpose(0, 2, 1), d)
    diagonal = np.arange(len(pace_N))
    system[:, diagonal, diagonal] += pace_N + d.sum(1)
    right = c.sum(1) - np.matmul((c_M / d_M)[:, None, :], d)[:, 0]
    dlevel = np.linalg.solve(system, right[:, :, None])[:, :, 0]
    dprice = (np.matmul(d, dlevel[:, :, None])[:, :, 0] - c_M) / d_M
    slope = np.where(held_LMN, dlevel[:, None, :] - dprice[:, :, None], 0.0)
    dy = c - d * slope
    return dy, slope + risk_LM[:, :, None] * dy


def _longest(y: Floats, dy: Floats, z: Floats, dz: Floats) -> Floats:
    """step_L: the longest step, at most 1, that keeps 5 % of every y and z."""
    with np.errstate(divide="ignore", invalid="ignore"):
        limit_y = np.where(dy < 0, -y / dy, _HUGE).min((1, 2))
        limit_z = np.where(dz < 0, -z / dz, _HUGE).min((1, 2))
    step: Floats = np.minimum(1.0, 0.95 * np.minimum(limit_y, limit_z))
    return step
