"""The baseline: DeepSeek's expert-parallel load balancer, written from its published description, not from its code.

Global policy (the better balanced one: its hierarchical form only adds constraints). 1. Every expert gets one
replica; each further slot goes to the expert with the largest load per replica. 2. Replicas, heaviest first,
each go to the node with the least load that has a free slot; two replicas of one expert may meet on a node.
Traffic is split evenly over an expert's replicas.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def eplb(load_LE: Floats, nodes: int, slots: int) -> tuple[NDArray[np.int64], Floats]:
    """(slot_LNS, share_LNS), the share being 1 / replicas in each slot."""
    width = slots // nodes
    slot_LNS = np.zeros((len(load_LE), nodes, width), dtype=np.int64)
    share_LNS = np.zeros(slot_LNS.shape)
    for layer, load_E in enumerate(load_LE):
        replicas = _replicate(load_E, slots)
        items = [expert for expert, count in enumerate(replicas) for _ in range(count)]
        each = load_E / replicas
        for node, experts in enumerate(_pack(items, each, nodes, width)):
            slot_LNS[layer, node] = experts
            share_LNS[layer, node] = 1.0 / np.array(replicas)[experts]
    return slot_LNS, share_LNS


def _replicate(load_E: Floats, slots: int) -> list[int]:
    replicas = np.ones(len(load_E), dtype=np.int64)
    for _ in range(slots - len(load_E)):
        replicas[np.argmax(load_E / replicas)] += 1
    return [int(count) for count in replicas]


def _pack(items: Sequence[int], each: Floats, nodes: int, width: int) -> list[list[int]]:
    load = [0.0] * nodes
    held: list[list[int]] = [[] for _ in range(nodes)]
    for expert in sorted(items, key=lambda e: -each[e]):
        node = min((n for n in range(nodes) if len(held[n]) < width), key=load.__getitem__)
        held[node].append(expert)
        load[node] += float(each[expert])
    return held
