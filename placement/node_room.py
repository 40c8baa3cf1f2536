"""How a node's memory is shared out: what `afserve up` keeps for a KV cache, and what `afserve plan` counts upon.

All sizes are bytes. It knows no machine and no model.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

USABLE = 0.90
"""Of the memory that is free; the rest is everybody else's, and for fragmentation."""
NODE_OVERHEAD = 256 << 20  # interpreter, torch, buffers: 210 to 240 MiB measured, without weights and KV
KV_SHARE = 0.5  # of what weights leave of a machine that others use too, unless the user says
_MOST = 4.0 * (1 << 30)  # there
_OWN_SHARE = 0.8  # of memory that nobody else uses: a step's rows, its logits, its graphs and the context take the rest
Amount = TypeVar("Amount", float, NDArray[np.float64])


def left_by(memory: float, taken: Amount, nodes: int = 1) -> Amount:
    """What so many nodes leave, with weights and whatever lies beside caches; below 0 where they do not fit."""
    return memory * USABLE - taken - nodes * NODE_OVERHEAD


def kv_bytes(room: Amount, *, own: bool) -> Amount:
    """Of the `room` that weights leave an attention node, what its KV cache takes. own: nobody else uses that memory,
    which is a GPU's, or a cluster file says it of a host."""
    return room * _OWN_SHARE if own else np.minimum(room * KV_SHARE, _MOST)
