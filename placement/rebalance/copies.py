"""How often experts stand: the first placement of a run with several copies, and how many copies a placement has.

Values only. It knows no loads; the optimizer balances copies once there are routing counts.
"""

from collections.abc import Sequence

import numpy as np

from afserve.placement.optimizer.domains import DomainSpans, apart
from afserve.placement.optimizer.problem import Ints, Nodes, check_copies
from afserve.placement.optimizer.robust import spread
from afserve.placement.optimizer.split import count_replicas
from afserve.placement.placement import FREE, LayerPlacement, Placement


def copied(*, layers: int, experts: int, copies: int, nodes: Nodes, slots_per_node: int) -> Placement:
    """Every expert at least `copies` times, as even as that goes, in the widest failure domains with room for it.

    Each node shares experts with many others, so the rows of a lost one go to many. All layers are alike; shares are
    equal. `nodes` says how many slots may be used, `slots_per_node` how many there
    are. Raises ConfigError where the copies do not fit.
    """
    check_copies(copies, nodes, experts)
    domain_N, room_N = nodes.domains(experts, copies), nodes.usable_slots().clip(max=experts)
    load_LE, count_LE = np.ones((1, experts)), np.full((1, experts), copies)
    dealt = spread(load_LE[None], np.ones(1), count_LE, room_N, nodes.pace(), domain_N)
    slot_LNS = apart(dealt, load_LE, copies, domain_N, room_N)
    wide = ((0, 0), (0, max(0, slots_per_node - slot_LNS.shape[2])))
    slot_NS = np.pad(slot_LNS[0], wide, constant_values=FREE)
    replicas_E = count_replicas(slot_LNS, experts)[0]
    share_NS = np.where(slot_NS == FREE, 0.0, 1.0 / replicas_E[slot_NS])
    layer = LayerPlacement(tuple(map(tuple, slot_NS.tolist())), tuple(map(tuple, share_NS.tolist())))
    return Placement(0, len(nodes), experts, (layer,) * layers)


def least_slots(experts: int, copies: int, nodes: int, host: Sequence[int] = ()) -> int:
    """Slots per node that `copies` of every expert need, on different hosts where there are as many."""
    width = -(-experts * copies // nodes)
    if len(set(host)) < copies:
        return width
    place = Nodes((0,) * nodes, host=tuple(host)).hosts()
    while not Nodes((width,) * nodes).holds(experts, copies, np.unique(place, return_inverse=True)[1]):
        width += 1
    return width


def copies_in_words(placement: Placement, host: Sequence[int] = ()) -> str:
    """What the loss of a node, and of a host where there are several, would leave without a copy."""
    fewest, once = _fewest(placement, np.arange(placement.nodes))
    if fewest < 2:
        return f"{once} of {placement.experts} experts of a layer have one copy only"
    said = f"every expert has {fewest} copies"
    if len(set(host)) < 2:
        return said
    fewest, once = _fewest(placement, np.unique(host, return_inverse=True)[1])
    if fewest > 1:
        return f"{said}, on different hosts"
    return f"{said}, {once} of {placement.experts} experts of a layer on one host only"


def _fewest(placement: Placement, domain_N: Ints) -> tuple[int, int]:
    """(the least number of domains of any expert, the most experts of a layer that are in one domain only)."""
    span_LE = DomainSpans(placement.slot_array(), placement.experts, 1, domain_N).span
    return int(span_LE.min()), int((span_LE < 2).sum(1).max())
