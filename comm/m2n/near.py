"""Which replica is near: rows go to expert nodes on the sender's own NUMA node as far as an expert's shares allow.

The shares are kept over all attention nodes, which are taken to send alike, as many from each NUMA node: what those of
one do not find near, they take from the replicas that the others leave over. Example: two NUMA nodes and shares of 0.7
and 0.3. The attention nodes of the first send every row near; those of the second 0.6 near and 0.4 far.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from afserve.comm.binding import seat
from afserve.member import NodeId, expert_node
from afserve.placement.placement import FREE, LayerPlacement


@dataclass(frozen=True, slots=True)
class Near:
    """For the attention nodes on the NUMA node `own` of `count`."""

    own: int
    count: int

    @classmethod
    def of(cls, node: NodeId, count: int) -> "Near":
        return cls(seat(node, count), count)

    def shares(self, layer: LayerPlacement) -> LayerPlacement:
        """The layer with the shares by which these nodes choose; an expert's sum to 1, as before."""
        there: dict[int, dict[int, float]] = {}
        rows = list(enumerate(zip(layer.slots, layer.share, strict=True)))
        for node, (row, shares) in rows:
            for expert, share in zip(row, shares, strict=True):
                if expert != FREE and share > 0:
                    held = there.setdefault(expert, {})
                    held[self._at(node)] = held.get(self._at(node), 0.0) + share
        times = {expert: self._times(held) for expert, held in there.items()}
        return replace(
            layer,
            share=tuple(
                tuple(
                    old * times[e][self._at(node)] if old > 0 else old
                    for e, old in zip(row, shares, strict=True)
                )
                for node, (row, shares) in rows
            ),
        )

    def _at(self, node: int) -> int:
        return seat(expert_node(node), self.count)

    def _times(self, held: Mapping[int, float]) -> dict[int, float]:
        """By what to multiply the shares on each NUMA node, from what there is of an expert on each."""
        fair = 1 / self.count
        over = {at: max(0.0, share - fair) for at, share in held.items()}
        left, near = sum(over.values()), min(fair, held.get(self.own, 0.0))
        far = (fair - near) / left if left > 0 else 0.0
        taken = {at: near if at == self.own else far * over[at] for at in held}
        return {at: taken[at] / fair / held[at] for at in held}
