"""Exchanges equal nodes so that the replicas of one expert stand in different racks, as far as that is possible.

Loads, shares and slots stay as they are; only the numbers of equal nodes change. It is greedy and begins with the nodes
that share experts with most others.
"""

import numpy as np

from afserve.placement.optimizer.problem import Floats, Ints

_CHUNK = 4_000_000  # elements of one (layer, node, node) array


def over_racks(
    slot_LNS: Ints, share_LNS: Floats, experts: int, rack_N: Ints, kind_N: Ints
) -> tuple[Ints, Floats]:
    """The same nodes in another order, per layer; nodes trade places only within their kind (slots and speed)."""
    slot, share = slot_LNS.copy(), share_LNS.copy()
    step = max(1, _CHUNK // len(rack_N) ** 2)
    for start in range(0, len(slot), step):
        part = slice(start, start + step)
        place_LN = _places(slot_LNS[part], experts, rack_N, kind_N)
        row = np.arange(len(place_LN))[:, None]
        slot[part][row, place_LN], share[part][row, place_LN] = slot_LNS[part], share_LNS[part]
    return slot, share


def _places(slot_LNS: Ints, experts: int, rack_N: Ints, kind_N: Ints) -> Ints:
    """place_LN: the new number of each node."""
    layers, nodes, _ = slot_LNS.shape
    row, node = np.arange(layers), np.arange(nodes)
    has = np.zeros((layers, nodes, experts + 1), dtype=np.float32)
    has[row[:, None, None], node[:, None], slot_LNS] = 1.0  # FREE marks the last column
    shared = np.matmul(has[:, :, :experts], has[:, :, :experts].transpose(0, 2, 1))
    shared[:, node, node] = 0.0
    order_LN = np.argsort(-shared.sum(2), axis=1, kind="stable")
    near = np.zeros(
        (layers, nodes, int(rack_N.max()) + 1)
    )  # what a node shares with those already in each rack
    taken = np.zeros((layers, nodes), dtype=bool)
    place_LN = np.zeros((layers, nodes), dtype=np.int64)
    for step in range(nodes):
        moving = order_LN[:, step]
        cost = near[row, moving][:, rack_N]
        cost[taken | (kind_N[moving][:, None] != kind_N)] = np.inf
        place = cost.argmin(1)
        taken[row, place] = True
        place_LN[row, moving] = place
        near[row, :, rack_N[place]] += shared[row, :, moving]
    return place_LN
