"""Lower bounds on the largest node load, whatever the placement. They know no placement.

Let w be a layer's loads, v the live nodes' speeds, N and S the live nodes and slots, R = S - E the spare slots, and
T = max_n load_n / v_n of any placement with any split.
  mean      The nodes' loads sum to the experts', so T >= sum w / sum v.
  replicas  An expert with r replicas stands on r nodes, so w_e <= T V_r with V_r the sum of the r fastest speeds. So e
            needs k_e(T) = min{r : T V_r >= w_e} <= N replicas, and all together fit only if sum_e k_e(T) <= S. k_e
            only falls with T: the smallest T that satisfies this is a bound. Where every expert must have c copies,
            k_e is at least c.
  pigeons   At most R experts have two or more replicas. So of the k N + 1 + R heaviest at least k N + 1 stand once,
            and some node holds k + 1 of those whole: T max(v) >= the k + 1 lightest of the k N + 1 + R heaviest. With
            R = 0 and s slots on every node that node is full: add the s - k - 1 lightest experts of the layer.
A layer's bound is the largest of the three. Each scenario obeys its own, so their weighted mean bounds the weighted
mean of the scenarios' largest loads under any one placement, even with shares of its own for each scenario.
"""

import numpy as np

from afserve.placement.optimizer.problem import Floats, Ints

_HALVINGS = 50


def lower_bound(load_LE: Floats, room_N: Ints, pace_N: Floats, copies: int = 1) -> Floats:
    """bound_L, in rows per unit of speed. Every expert has at least `copies` replicas."""
    live = room_N > 0
    speed = np.sort(pace_N[live])[::-1]
    mean_L = load_LE.sum(1) / speed.sum()
    bound: Floats = np.maximum(mean_L, _pigeon(load_LE, room_N[live], speed))
    slots = int(room_N.sum())
    tight = _needed(load_LE, bound, speed, copies) > min(slots, load_LE.shape[1] * len(speed))
    if tight.any():
        bound[tight] = _replicas(load_LE[tight], bound[tight], speed, slots, copies)
    return bound


def _needed(load_LE: Floats, level_L: Floats, speed: Floats, copies: int) -> Ints:
    """Replicas that all experts need together at level T; an impossible expert counts as more than there are."""
    reach = np.cumsum(speed)
    ratio = load_LE / np.maximum(level_L, 1e-300)[:, None] * (1 - 1e-12)
    if np.ptp(speed) == 0.0:
        need = np.maximum(1, np.ceil(ratio / speed[0])).astype(np.int64)
    else:
        need = 1 + np.searchsorted(reach, ratio, side="left")
    need = np.where(need > len(speed), 10**9, np.maximum(need, copies))
    total: Ints = need.sum(1)
    return total


def _replicas(load_LE: Floats, low_L: Floats, speed: Floats, slots: int, copies: int) -> Floats:
    """Bisection: `low` stays infeasible throughout, so it is a bound at every step."""
    low = low_L.copy()
    high = np.maximum(low, load_LE.max(1) / speed[-1])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        feasible = _needed(load_LE, middle, speed, copies) <= slots
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
