"""Which experts have no node since one was lost, and for how long: values in, incidents out.

It only tells; what is done about it is decided elsewhere.
"""

from afserve.control.membership.events import Happening, Incident, MemberId
from afserve.placement.placement import Placement
from afserve.placement.recovery import homeless


class Coverage:
    """Owns the first loss that left experts without a node, until all have one again."""

    def __init__(self) -> None:
        self._lost: MemberId | None = None
        self._since = 0.0
        self._seen: tuple[int, frozenset[int]] | None = None

    @property
    def lacking(self) -> bool:
        """Whether a loss has left experts without a node since which not all were seen to have one again."""
        return self._lost is not None

    def lost(self, member: MemberId, placement: Placement, serving: frozenset[int], now: float) -> str:
        """An expert node is gone, `serving` are left. What becomes of its rows, in words."""
        alone = len(homeless(placement, serving))
        if not alone:
            return "its rows go to replicas"
        if self._lost is None:
            self._lost, self._since, self._seen = member, now, None
        return f"{alone} experts that no other node holds are loaded elsewhere or wait for its return"

    def check(self, placement: Placement, serving: frozenset[int], now: float) -> list[Incident]:
        """Said once, when every expert has a node again."""
        if self._lost is None or self._seen == (placement.epoch, serving):
            return []
        self._seen = (placement.epoch, serving)
        if homeless(placement, serving):
            return []
        lost, self._lost = self._lost, None
        why = f"every expert has a node again, epoch {placement.epoch}"
        return [Incident(Happening.COVERED, lost.node, why, now - self._since, generation=lost.generation)]
