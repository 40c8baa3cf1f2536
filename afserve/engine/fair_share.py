"""Who of several tenants has the next turn: the waiting requests of a node, and what each tenant was given.

Every token that is computed counts for its tenant, divided by the tenant's share, and the tenant with the lowest count
has the next turn: a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Who
comes back after a time without prompts is lifted to the lowest count of those who wait, so nobody saves up turns.
Priorities come first, and among equal requests of a tenant the elder. With one tenant this is the order of arrival. It
knows no tensors and no clock.
"""

from collections import Counter, deque
from collections.abc import Iterator

from afserve.engine.sequence import Sequence

Turn = tuple[int, float, int]


class FairShares:
    """What the tenants of a node's open requests were given, in tokens per unit of share.

    A tenant is behind while prompt tokens of its requests wait to be computed. Without another tenant nothing is
    counted: what nobody else waited for costs nothing.
    """

    def __init__(self) -> None:
        self._given: dict[str, float] = {}  # of tenants with open requests
        self._open: Counter[str] = Counter()
        self._behind: dict[str, set[int]] = {}  # requests by their order; tenants without any are not there

    @property
    def several(self) -> bool:
        return len(self._open) > 1

    def given(self, tenant: str) -> float:
        return self._given.get(tenant, 0.0)

    def opened(self, sequence: Sequence) -> None:
        self._open[sequence.request.tenant.name] += 1

    def closed(self, sequence: Sequence) -> None:
        """It has ended. A tenant without requests is forgotten: so many are known as there are open requests."""
        self.met(sequence)
        name = sequence.request.tenant.name
        self._open[name] -= 1
        if not self._open[name]:
            del self._open[name]
            self._given.pop(name, None)

    def needs(self, sequence: Sequence) -> None:
        """Its prompt waits to be computed."""
        name = sequence.request.tenant.name
        mine = self._behind.get(name)
        if mine is None:
            others = [self.given(other) for other in self._behind]
            level = min(others) if others else max((self.given(other) for other in self._open), default=0.0)
            self._given[name] = max(self.given(name), level)
            mine = self._behind[name] = set()
        mine.add(sequence.order)

    def met(self, sequence: Sequence) -> None:
        """Its prompt is computed, or nobody wants it any more."""
        name = sequence.request.tenant.name
        mine = self._behind.get(name)
        if mine is not None:
            mine.discard(sequence.order)
            if not mine:
                del self._behind[name]

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """So many are computed for it in a step."""
        if self.several:
            tenant = sequence.request.tenant
            self._given[tenant.name] = self.given(tenant.name) + tokens / tenant.share

    def turn(self, sequence: Sequence) -> Turn:
        """The lowest is first."""
        priority, order = sequence.rank
        return priority, self.given(sequence.request.tenant.name), order

    def check(self, sequences: list[Sequence]) -> None:
        """Integrity, against all open requests; for tests and debugging."""
        assert self._open == Counter(s.request.tenant.name for s in sequences), "open requests are miscounted"
        orders = {(s.request.tenant.name, s.order) for s in sequences}
        behind = {(name, order) for name, mine in self._behind.items() for order in mine}
        assert behind <= orders and all(self._behind.values()), "a request that has ended is behind"
        assert set(self._given) <= set(self._open), "a tenant without requests is remembered"


class WaitingRequests:
    """The waiting requests of a node, each tenant's by rank."""

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._queues: dict[str, deque[Sequence]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def add(self, sequence: Sequence) -> None:
        """Behind all of its tenant that come before it by rank; usually the last."""
        queue = self._queues.setdefault(sequence.request.tenant.name, deque())
        position = len(queue)
        while position and queue[position - 1].rank > sequence.rank:
            position -= 1
        queue.insert(position, sequence)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        name = sequence.request.tenant.name
        self._queues[name].remove(sequence)
        self._count -= 1
        if not self._queues[name]:
            del self._queues[name]

    def first(self) -> Sequence | None:
        """Whose turn it is, of those that could run: of each tenant the first by rank."""
        heads = (next((s for s in queue if s.ready), None) for queue in self._queues.values())
        return min((head for head in heads if head is not None), key=self._shares.turn, default=None)

    def room(self, sequence: Sequence, most: int) -> bool:
        """Whether one more may wait: `most` in all, or as many of its tenant as its share of `most` is among those who
        wait. So a tenant that fills the queue keeps no other one out; but never do twice as many wait."""
        if self._count < most:
            return True
        if self._count >= 2 * most:
            return False
        mine = sequence.request.tenant
        shares = {name: queue[0].request.tenant.share for name, queue in self._queues.items()}
        shares[mine.name] = mine.share
        own = len(self._queues.get(mine.name, ()))
        return len(shares) > 1 and own < most * mine.share // sum(shares.values())
