"""Which peers of one end are gone, and who is told: an attention node on every call, an expert node once per loss.

An expert node goes on without a lost attention node, and another node may take that place. An attention node cannot go
on without an expert node. How a loss is noticed is not known here.
"""

from collections.abc import Sequence

from afserve.comm.transport import Box
from afserve.errors import PeerLost


class Lost:
    """`attention_side` tells which index of a box is the peer's."""

    def __init__(self, *, attention_side: bool) -> None:
        self._attention_side = attention_side
        self._why: dict[int, str] = {}

    def mark(self, peer: int, why: str) -> None:
        self._why.setdefault(peer, why)

    def forget_loss(self, peer: int) -> None:
        """Somebody has that place again."""
        self._why.pop(peer, None)

    def __contains__(self, peer: int) -> bool:
        return peer in self._why

    def __bool__(self) -> bool:
        return bool(self._why)

    def raise_for(self, boxes: Sequence[Box]) -> None:
        """Raises PeerLost naming the first of the boxes' peers that is gone."""
        for box in boxes:
            peer = box.expert if self._attention_side else box.attention
            if peer not in self._why:
                continue
            if self._attention_side:
                raise PeerLost(box.expert_node, self._why[peer])
            raise PeerLost(box.attention_node, self._why.pop(peer))
