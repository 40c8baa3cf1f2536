"""Lower bounds on the largest node load, whatever the placement. They know no placement.

Let w be the loads of a layer, v the live nodes' speeds, N and S the live nodes and slots, R = S - E the spare slots.
With T = max_n load_n / v_n of any placement and any split:
  mean     sum load_n = sum w, so T >= sum w / sum v.
  replicas an expert with r replicas stands on r nodes, so w_e <= T * (sum of the r fastest speeds). Hence e needs at least
           k_e(T) = min{r : T * V_r >= w_e} replicas; all of them together fit only if sum_e k_e(T) <= S, k_e(T) <= N.
           The smallest T that satisfies this is a bound (k_e only falls with T).
  pigeon   at most R experts have two or more replicas. Among the k N + 1 + R heaviest experts at least k N + 1 stand once, so some node
           holds k + 1 of them whole: T * v_max >= the k + 1 lightest of those k N + 1 + R. With R = 0 the node's other slots are
           filled too where all nodes have s slots: add the s - k - 1 lightest experts of all.
The bound of a layer is the largest of the three; of scenarios, the weighted mean (the largest load of the mean of several loads
can be below the mean of their largest, never the other way, and each scenario obeys its own bound).
"""

import numpy as np

from afserve.placement.problem import Floats, Ints

_HALVINGS = 50


def lower_bound(load_LE: Floats, room_N: Ints, pace_N: Floats) -> Floats:
    """bound_L, in rows per unit of speed."""
    live = room_N > 0
    speed = np.sort(pace_N[live])[::-1]
    mean_L = load_LE.sum(1) / speed.sum()
    bound: Floats = np.maximum(mean_L, _pigeon(load_LE, room_N[live], speed))
    slots = int(room_N.sum())
    tight = _needed(load_LE, bound, speed) > min(slots, load_LE.shape[1] * len(speed))
    if tight.any():
        bound[tight] = _replicas(load_LE[tight], bound[tight], speed, slots)
    return bound


def _needed(load_LE: Floats, level_L: Floats, speed: Floats) -> Ints:
    """Replicas that all experts need together at level T; an impossible expert counts as more than there are."""
    reach = np.cumsum(speed)
    ratio = load_LE / np.maximum(level_L, 1e-300)[:, None] * (1 - 1e-12)
    if np.ptp(speed) == 0.0:
        need = np.maximum(1, np.ceil(ratio / speed[0])).astype(np.int64)
    else:
        need = 1 + np.searchsorted(reach, ratio, side="left")
    need = np.where(need > len(speed), 10**9, need)
    total: Ints = need.sum(1)
    return total


def _replicas(load_LE: Floats, low_L: Floats, speed: Floats, slots: int) -> Floats:
    """Bisection: `low` stays infeasible throughout, so it is a bound at every step."""
    low = low_L.copy()
    high = np.maximum(low, load_LE.max(1) / speed[-1])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        feasible = _needed(load_LE, middle, speed) <= slots
        high = np.where(feasible, middle, high)
        low = np.where(feasible, low, middle)
    return low


def _pigeon(load_LE: Floats, room_N: Ints, speed: Floats) -> Floats:
    layers, experts = load_LE.shape
    nodes, spare = len(room_N), int(room_N.sum()) - experts
    best = np.zeros(layers)
    if nodes + 1 + spare > experts:
        return best
    ordered = -np.sort(-load_LE, axis=1)
    width = int(room_N[0]) if spare == 0 and (room_N == room_N[0]).all() else 0
    for k in range((experts - 1 - spare) // nodes + 1):
        last = k * nodes + 1 + spare
        crowd = ordered[:, last - k - 1 : last].sum(1)
        if width > k + 1:
            crowd = crowd + ordered[:, experts - (width - k - 1) :].sum(1)
        best = np.maximum(best, crowd)
    scaled: Floats = best / speed[0]
    return scaled
