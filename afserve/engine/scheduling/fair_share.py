"""Who of several tenants has the next turn: the waiting requests of a node, and what each tenant was given.

Every token that is computed counts for its tenant, divided by the tenant's share, and the tenant with the lowest count
has the next turn: a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Who
comes back after a time without prompts is lifted to the lowest count of those who wait, so nobody saves up turns; and
what a tenant was given beyond those who wait counts until they have as much, also when its requests have ended.
Priorities come first. Within a tenant prompts have their turns by what they lack (`turns`), so that a short one does
not wait for all that came before it. It knows no tensors and no clock.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator

from afserve.engine.scheduling.sequence import Sequence, turn_of

Turn = tuple[int, float, int, int]
MOST_AHEAD = 64  # requests that nobody waits for; their time passes
_MOST_LEFT = 1024  # tenants without requests that are remembered


class FairShares:
    """What the tenants of a node's open requests were given, in tokens per unit of share.

    A tenant is behind while prompt tokens of its requests wait to be computed. Without another tenant nothing is
    counted: what nobody else waited for costs nothing. Nor does what is computed ahead, which takes nobody's turn.
    """

    def __init__(self) -> None:
        self._given: dict[str, float] = {}  # of tenants with open requests
        self._left: dict[str, float] = {}  # of those without, where somebody waits who was given less
        self._open: Counter[str] = Counter()
        self._behind: dict[str, set[int]] = {}  # requests by their order; tenants without any are not there

    @property
    def several(self) -> bool:
        return len(self._open) + len(self._left) > 1

    def given(self, tenant: str) -> float:
        return self._given.get(tenant, 0.0)

    def opened(self, sequence: Sequence) -> None:
        if sequence.request.ahead:
            return
        name = sequence.request.tenant.name
        self._open[name] += 1
        if name in self._left:
            self._given[name] = self._left.pop(name)

    def closed(self, sequence: Sequence) -> None:
        """It has ended. A tenant without requests is forgotten, unless somebody waits who was given less."""
        if sequence.request.ahead:
            return
        self.met(sequence)
        name = sequence.request.tenant.name
        self._open[name] -= 1
        if not self._open[name]:
            del self._open[name]
            given = self._given.pop(name, 0.0)
            if self._behind and given > self._level() and len(self._left) < _MOST_LEFT:
                self._left[name] = given

    def needs(self, sequence: Sequence) -> None:
        """Its prompt waits to be computed."""
        if sequence.request.ahead:
            return
        name = sequence.request.tenant.name
        mine = self._behind.get(name)
        if mine is None:
            level = self._level() if self._behind else max(map(self.given, self._open), default=0.0)
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
                self._forget()

    def charge(self, sequence: Sequence, start: int, count: int) -> None:
        """So many are computed for it in a step. Those that a preemption took count once."""
        if self.several and not sequence.request.ahead:
            if start < sequence.counted:
                count = max(0, start + count - sequence.counted)
            tenant = sequence.request.tenant
            self._given[tenant.name] = self.given(tenant.name) + count / tenant.share
            self._forget()

    def _level(self) -> float:
        """The lowest count of those who wait."""
        return min(map(self.given, self._behind))

    def _forget(self) -> None:
        """Tenants without requests that are ahead of nobody who waits."""
        if self._left:
            level = self._level() if self._behind else float("inf")
            self._left = {name: given for name, given in self._left.items() if given > level}

    def turn(self, sequence: Sequence) -> Turn:
        """The lowest is first."""
        priority, turn, order = sequence.prompt_rank
        return priority, self.given(sequence.request.tenant.name), turn, order

    def step_turn(self, sequence: Sequence) -> tuple[int, tuple[float, ...]]:
        """As `turn_of`, with prompts in the order of what their tenants were given."""
        kind, rank = turn_of(sequence)
        return kind, self.turn(sequence) if kind > 1 else rank

    def check(self, sequences: list[Sequence]) -> None:
        """Integrity, against all open requests; for tests and debugging."""
        sequences = [s for s in sequences if not s.request.ahead]
        assert self._open == Counter(s.request.tenant.name for s in sequences), "open requests are miscounted"
        orders = {(s.request.tenant.name, s.order) for s in sequences}
        behind = {(name, order) for name, mine in self._behind.items() for order in mine}
        assert behind <= orders and all(self._behind.values()), "a request that has ended is behind"
        assert set(self._given) <= set(self._open), "a tenant without requests is remembered"
        assert not set(self._left) & set(self._open), "a tenant with requests is taken for one without"
        assert all(given > self._level() for given in self._left.values()), "a tenant is ahead of nobody"


class WaitingRequests:
    """The waiting requests of a node, each tenant's in their turns."""

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._queues: dict[str, list[Sequence]] = {}
        self._count = 0
        self.ahead = 0  # of those, what nobody waits for

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def add(self, sequence: Sequence) -> None:
        queue = self._queues.setdefault(sequence.request.tenant.name, [])
        insort(queue, sequence, key=lambda one: one.prompt_rank)
        self._count += 1
        self.ahead += sequence.request.ahead

    def remove(self, sequence: Sequence) -> None:
        name = sequence.request.tenant.name
        self._queues[name].remove(sequence)
        self._count -= 1
        self.ahead -= sequence.request.ahead
        if not self._queues[name]:
            del self._queues[name]

    def first(self) -> Sequence | None:
        """Whose turn it is, of those that could run: of each tenant the first."""
        heads = (next((s for s in queue if s.ready), None) for queue in self._queues.values())
        return min((head for head in heads if head is not None), key=self._shares.turn, default=None)

    def room(self, sequence: Sequence, most: int) -> bool:
        """Whether one more may wait: `most` in all, or as many of its tenant as its share of `most` is among those who
        wait. So a tenant that fills the queue keeps no other one out; but never do twice as many wait. Of what nobody
        waits for there is a number of its own."""
        if sequence.request.ahead:
            return self.ahead < MOST_AHEAD
        count = self._count - self.ahead
        if count < most:
            return True
        if count >= 2 * most:
            return False
        mine = sequence.request.tenant
        heads = {name: queue[0].request for name, queue in self._queues.items()}
        shares = {name: head.tenant.share for name, head in heads.items() if not head.ahead}
        shares[mine.name] = mine.share
        own = sum(not one.request.ahead for one in self._queues.get(mine.name, ()))
        return len(shares) > 1 and own < most * mine.share // sum(shares.values())
